"""The commands verify-and-run and demo."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

from runtime.blocks.kv_format import KV_FORMATS
from runtime.blocks.pages import BLOCK
from runtime.report import show_run
from runtime.request import COMPUTE, TIMEOUT, VISION, silent
from runtime.verbs import verify_and_run
from shard_plans.console import emit, progress
from shard_plans.options import PATH, Verb, json_option, refuse

LIBRARY = "transformers"
"""As --reference: that library's own model."""


@click.command("verify-and-run", cls=Verb)
@click.argument("out", type=PATH)
@click.option(
    "--reference", "references", type=PATH, multiple=True, metavar="CHECKPOINT",
    help="The checkpoint, run unsharded in fp32 and compared layer by layer; given again as `transformers`, with that "
    "library's own model besides.",
)  # fmt: skip
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda, musa, npu, xpu; `cuda:1` picks one.")
@click.option("--backend", help="Collective backend under torchrun; by default the device's own.")
@click.option("--prompt", help="Text to continue, by the checkpoint's tokenizer.")
@click.option("--input-ids", help="Token ids: 1,2,3, or a safetensors file with `input_ids` (and images).")
@click.option("--prompts", type=PATH, help="A file of prompts, one a line, which are answered all at once.")
@click.option(
    "--context", type=click.IntRange(1), help="Without any of these: how many tokens of a fixed list to run (16)."
)
@click.option("--max-new-tokens", type=click.IntRange(0), help="Tokens to generate (32 with prompts, else 0).")
@click.option("--kv-cache", type=click.Choice(list(KV_FORMATS)), help="What the cache stores; by default as computed.")
@click.option(
    "--kv-block", default=BLOCK, show_default=True, type=click.IntRange(1), help="Tokens of a block of the cache."
)
@click.option("--kv-blocks", type=click.IntRange(1), help="Blocks of each layer; by default as many as are needed.")
@click.option("--prefill-chunk", type=click.IntRange(1), help="Most tokens of prompts in one pass (all at once).")
@click.option(
    "--vision", default=VISION[0], show_default=True, type=click.Choice(VISION),
    help="Each tp rank looks at all images, or at some of them.",
)  # fmt: skip
@click.option(
    "--resident-layers", default=3, show_default=True, type=click.IntRange(1),
    help="Layers whose weights are in memory at a time: the one that runs, and those that are loaded meanwhile.",
)  # fmt: skip
@click.option("--verify-device", is_flag=True, help="Hash weights once more behind their copy to the device.")
@click.option("--compute", default="float32", show_default=True, type=click.Choice(list(COMPUTE)))
@click.option(
    "--timeout", default=TIMEOUT, show_default=True, type=float, metavar="SECONDS",
    help="How long a rank may be in one operator before it is taken to hang.",
)  # fmt: skip
@click.option("--quick", is_flag=True, help="Load, run and compare a few layers alone, of every kind.")
@click.option("--sensitivity", is_flag=True, help="Show what each group of weights would cost in FP8 and INT8.")
@click.option("--logits-out", type=PATH, help="Write the prefill's logits to this safetensors file.")
@click.option("--html", type=PATH, help="Write the report to this file, as a page that needs nothing else.")
@click.option("--junit", type=PATH, help="Write the checks to this file as JUnit XML, for CI.")
@json_option
def verify_and_run_command(out: str, references: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Load an output, run its sharded forward pass, compare and generate (exit 1: a check failed).

    One process runs all ranks in turn; under torchrun each process is a rank:
    torchrun --nproc-per-node N -m reshard verify-and-run OUT
    """
    folders = [given for given in references if given != LIBRARY]
    if len(folders) > 1:
        raise click.UsageError(f"--reference names {folders[0]} and {folders[1]}: give one checkpoint")
    options["reference"] = folders[0] if folders else None
    options["transformers"] = LIBRARY in references
    shown = progress if os.environ.get("RANK", "0") == "0" else silent
    report = partial(refuse, "verify-and-run", as_json=as_json)
    result = verify_and_run(out, progress=shown, report=report, **options)
    if result.reports:
        if as_json:
            emit(result.as_dict())
        else:
            show_run(result)
    sys.exit(0 if result.passed else 1)


@click.command("demo", cls=Verb)
@click.option("-o", "--output", type=PATH, help="Keep the checkpoint, plan and shards in this folder.")
@json_option
def demo_command(output: str | None, as_json: bool) -> None:
    """Plan, convert, check, verify and restore a small FP8 MoE checkpoint that reshard makes itself."""
    from runtime.demo.story import demo

    sys.exit(demo(Path(output) if output else None, as_json))
