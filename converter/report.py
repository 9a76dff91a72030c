"""Conversions, checks and restores for people."""

from __future__ import annotations

from converter.adopt import AdoptResult
from converter.convert import ConvertResult
from converter.findings import CheckResult
from converter.restore import RestoreResult
from shard_plans.console import out, size
from shard_plans.placement.experts import format_ids
from shard_plans.report_precision import show_precision


def show_convert(result: ConvertResult) -> None:
    """What was moved, and how fast."""
    console = out()
    show_precision(result.converted)
    if result.part is not None:
        left = (
            f"missing: part{'s' * (len(result.missing) > 1)} {format_ids(result.missing)}"
            if result.missing
            else "nothing is missing"
        )
        console.print(f"part {result.part} is made; {left}")
        if not result.bytes_written and not result.bytes_kept:
            return
    if not result.bytes_written and not result.bytes_kept:
        console.print("the same conversion lies there whole; every byte was compared, nothing was written")
        return
    rate = result.bytes_written / result.seconds if result.seconds else 0.0
    console.print(
        f"{result.tensors:,} tensors for {result.ranks} rank{'s' * (result.ranks != 1)}: "
        f"read {size(result.bytes_read)}, wrote {size(result.bytes_written)} in {result.seconds:.1f} s ({size(rate)}/s)"
    )
    if result.bytes_kept:
        console.print(f"{size(result.bytes_kept)} were there already, from an interrupted conversion, and are right")
    if result.skipped:
        console.print(f"{result.skipped:,} stored tensors were left out, as the plan says (manifest.json names them)")


def show_check(result: CheckResult, deep: bool) -> None:
    """The verdict, then every failure with its place."""
    console = out()
    what = "hashes, and every byte against the checkpoint" if deep else "hashes"
    if not result.hashes:
        what = "names, types and shapes; there are no hashes: reshard adopt records them"
    verdict = "[green]passed[/green]" if result.passed else "[red]failed[/red]"
    console.print(f"{verdict}: {result.files} files, {result.tensors:,} tensors ({what})")
    if result.absent:
        console.print(f"not there, so not checked: ranks {format_ids(result.absent)} (converted with --ranks)")
    if result.skipped:
        console.print(
            f"left out by the plan, so not compared: {result.skipped:,} stored tensors (manifest.json names them)"
        )
    for failure in result.failures:
        where = ", ".join(word for word in (failure.file, failure.tensor) if word)
        console.print(f"  {where}: {failure.reason}", markup=False)


def show_adopt(result: AdoptResult) -> None:
    """What the folder is."""
    console = out()
    console.print(
        f"{result.layout}, tp {result.tp} pp {result.pp} ep {result.ep}: {result.files} files, {result.tensors:,} "
        f"tensors, {size(result.bytes_hashed)} hashed in {result.seconds:.1f} s; manifest.json is written"
    )
    if result.announced:
        console.print("what the checkpoint held is taken from config.json; how it was divided into files isn't known")


def show_restore(result: RestoreResult) -> None:
    """What was put together."""
    out().print(f"{result.tensors:,} tensors, {size(result.bytes_written)} in {result.files} files")
    if result.dropped:
        out().print(f"{result.dropped:,} tensors of the source are missing: the plan left them out")
