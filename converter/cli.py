"""The commands convert, check, adopt and restore."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

import click

from converter.report import show_adopt, show_check, show_convert, show_restore
from converter.verbs import adopt, check, convert, restore
from shard_plans.console import emit, progress, remark
from shard_plans.options import PATH, SIZES, Verb, contradictions, family_option, json_option, sizes_options


@click.command("convert", cls=Verb)
@click.argument("checkpoint", type=PATH)
@click.argument("out", type=PATH)
@click.option("--plan", type=PATH, help="The plan that plan-memory wrote; else give the sizes.")
@sizes_options
@family_option
@click.option("--layout", metavar="NAME", help="For another loader than reshard's own: deepseek-mp, vllm@0.33.")
@click.option("--ranks", metavar="LIST", help="Only the files of these ranks, such as 8-15.")
@click.option("--part", metavar="I/N", help="Make one of N parts in a shared folder; the last one in finishes it.")
@click.option("--workers", default=4, show_default=True, type=click.IntRange(1, 64), help="Threads that move bytes.")
@click.option(
    "--buffer", default=16, show_default=True, type=click.IntRange(1, 1024), help="MiB that a thread moves at a time."
)
@click.option("--sha256", is_flag=True, help="Also write SHA256SUMS, for outputs that are signed or published.")
@click.option("--fresh", is_flag=True, help="Begin again, whatever an interrupted conversion left.")
@json_option
@click.pass_context
def convert_command(
    ctx: click.Context, /, checkpoint: str, out: str, plan: str | None, buffer: int, as_json: bool, **options: Any
) -> None:
    """Stream a checkpoint, or an output that stands for it, into hashed per-rank binaries."""
    clash = contradictions(ctx, SIZES)
    if plan and clash:
        raise click.UsageError(f"--plan contradicts {', '.join(clash)}: the plan says it already")
    with progress("converting") as advance:
        result = convert(checkpoint, out, plan, progress=advance, buffer=buffer << 20, **options)
    if result.fits is False:
        remark("this plan doesn't fit its cards; reshard plan-memory CHECKPOINT --plan FILE counts what is too much")
    if as_json:
        emit(asdict(result))
    else:
        show_convert(result)


@click.command("check", cls=Verb)
@click.argument("out", type=PATH)
@click.option("--deep", type=PATH, help="Put the source back together and compare it with this checkpoint.")
@json_option
def check_command(out: str, deep: str | None, as_json: bool) -> None:
    """Check an output: its hashes and, with --deep, every byte (exit 1: something differs)."""
    with progress("checking") as advance:
        result = check(out, deep, progress=advance)
    if as_json:
        emit(asdict(result))
    else:
        show_check(result, deep is not None)
    sys.exit(0 if result.passed else 1)


@click.command("adopt", cls=Verb)
@click.argument("folder", type=PATH)
@click.option("--checkpoint", type=PATH, help="What it was made from, or its config.json.")
@family_option
@click.option("--workers", default=4, show_default=True, type=click.IntRange(1, 64), help="Threads that hash.")
@json_option
def adopt_command(folder: str, as_json: bool, **options: Any) -> None:
    """Write hashed manifests into a folder that an engine's own tool wrote."""
    with progress("hashing") as advance:
        result = adopt(folder, progress=advance, **options)
    if as_json:
        emit(asdict(result))
    else:
        show_adopt(result)


@click.command("restore", cls=Verb)
@click.argument("out", type=PATH)
@click.argument("folder", type=PATH)
@click.option("--converted", is_flag=True, help="With the weights that --weights changed as they are now.")
@json_option
def restore_command(out: str, folder: str, converted: bool, as_json: bool) -> None:
    """Write the checkpoint again that an output was made from."""
    with progress("restoring") as advance:
        result = restore(out, folder, progress=advance, converted=converted)
    if as_json:
        emit(asdict(result))
    else:
        show_restore(result)
