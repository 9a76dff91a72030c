"""The commands verify-and-run and demo."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from runtime.report import show_run
from runtime.request import COMPUTE, silent
from runtime.verbs import verify_and_run
from shard_plans.console import emit, progress
from shard_plans.options import Verb, json_option


@click.command("verify-and-run", cls=Verb)
@click.argument("out", type=click.Path())
@click.option(
    "--reference", type=click.Path(), help="The checkpoint, run unsharded in fp32 and compared layer by layer."
)
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda, musa, npu, xpu; `cuda:1` picks one.")
@click.option("--backend", help="Collective backend under torchrun; by default the device's own.")
@click.option("--prompt", help="Text to continue, by the checkpoint's tokenizer.")
@click.option("--input-ids", help="Token ids: 1,2,3, or a safetensors file with `input_ids` (and images).")
@click.option("--max-new-tokens", type=click.IntRange(0), help="Tokens to generate (32 with --prompt, else 0).")
@click.option("--compute", default="float32", show_default=True, type=click.Choice(list(COMPUTE)))
@click.option("--logits-out", type=click.Path(), help="Write the prefill's logits to this safetensors file.")
@json_option
def verify_and_run_command(out: str, as_json: bool, **options: Any) -> None:
    """Load an output, run its sharded forward pass, compare and generate (exit 1: a check failed).

    One process runs all ranks in turn; under torchrun each process is a rank:
    torchrun --nproc-per-node N -m reshard verify-and-run OUT
    """
    if options["prompt"] is not None and options["input_ids"] is not None:
        raise click.UsageError("--prompt contradicts --input-ids: give one of them")
    shown = progress if os.environ.get("RANK", "0") == "0" else silent
    result = verify_and_run(out, progress=shown, **options)
    if result.reports:
        if as_json:
            emit(result.as_dict())
        else:
            show_run(result)
    sys.exit(0 if result.passed else 1)


@click.command("demo", cls=Verb)
@click.option("-o", "--output", type=click.Path(), help="Keep the checkpoint, plan and shards in this folder.")
@json_option
def demo_command(output: str | None, as_json: bool) -> None:
    """Plan, convert, check, verify and restore a small FP8 MoE checkpoint that reshard makes itself."""
    from runtime.demo.story import demo

    sys.exit(demo(Path(output) if output else None, as_json))
