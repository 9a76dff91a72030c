"""The result of verify-and-run, for people."""

from __future__ import annotations

from rich.table import Table

from runtime.checking.checks import Check
from runtime.run import RunResult
from shard_plans.console import out, size


def show_run(result: RunResult) -> None:
    """Print the checks, the answer, and what wasn't checked."""
    console = out()
    table = Table("check", "", "worst", "limit", "where", box=None, pad_edge=False, header_style="bold")
    for check in result.checks:
        mark = "[green]passed[/green]" if check.passed else "[red]FAILED[/red]"
        table.add_row(check.name, mark, *_numbers(check), _plain(check.where))
    console.print(table)
    for check in result.checks:
        if check.note:
            console.print(f"  {check.name}: {check.note}", markup=False)
    figures = result.figures
    if "bytes_read" in figures:
        images = f" and {figures['images']} images" if "images" in figures else ""
        console.print(
            f"{figures['ranks']} ranks ran {figures['tokens']} tokens{images} on {figures['device']} in "
            f"{figures['seconds']:.1f} s; {size(figures['bytes_read'])} of shards read, "
            f"{figures['seconds_waited']:.1f} s waited for them",
            markup=False,
        )
    if result.generated:
        console.print(f"generated: {', '.join(map(str, result.generated))}", markup=False)
    if result.text is not None:
        console.print(f"text: {result.text}", markup=False)
    for number, answer in enumerate(result.answers):
        words = ", ".join(map(str, answer.generated)) if answer.text is None else answer.text
        console.print(f"prompt {number}: {words}", markup=False)
    console.print("Not checked:")
    for sentence in result.not_checked:
        console.print(f"  - {sentence}", markup=False)
    console.print("passed" if result.passed else "FAILED", style="bold green" if result.passed else "bold red")


def _numbers(check: Check) -> tuple[str, str]:
    worst = "nan" if check.worst is None else f"{check.worst:.3g}"
    return worst, f"{check.limit:g}"


def _plain(text: str) -> str:
    return text.replace("[", r"\[")
