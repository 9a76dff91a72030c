"""The result of verify-and-run, for people: the verdict first."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from runtime.checking.checks import Check
from runtime.result import RunResult
from runtime.summary import verdict
from shard_plans.console import out, size


def show_run(result: RunResult) -> None:
    """Print the verdict, the checks, the figures, the answer, and what wasn't checked."""
    console = out()
    console.print(verdict(result), style="bold green" if result.passed else "bold red", markup=False)
    _checks(console, result)
    _texts(console, result)
    _sensitivity(console, result)
    _figures(console, result)
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


def _checks(console: Console, result: RunResult) -> None:
    table = Table("check", "", "worst", "limit", "where", box=None, pad_edge=False, header_style="bold")
    for check in result.checks:
        mark = "[green]passed[/green]" if check.passed else "[red]FAILED[/red]"
        table.add_row(check.name, mark, *_numbers(check), escape(check.where))
    console.print(table)
    for check in result.checks:
        if check.note:
            console.print(f"  {check.name}: {check.note}", markup=False)


def _texts(console: Console, result: RunResult) -> None:
    texts = result.figures.get("texts", ())
    for number, text in enumerate(texts if len(texts) > 1 else ()):
        if text["log_likelihood"] is None:
            continue
        words = f"prompt {number}: log-likelihood {text['log_likelihood']:.5f} a token, of {text['tokens']} tokens"
        if text["reference_log_likelihood"] is not None:
            words += f"; the reference's {text['reference_log_likelihood']:.5f}, divergence {text['divergence']:.1e}"
        console.print(words, markup=False)


def _sensitivity(console: Console, result: RunResult) -> None:
    if not result.sensitivity:
        return
    console.print("If one group of weights alone were stored in 8 bits, with the costliest first:")
    table = Table("group", "format", box=None, pad_edge=False, header_style="bold")
    for name in ("divergence", "log-likelihood", "cosine", "routes alike"):
        table.add_column(name, justify="right")
    for cost in result.sensitivity:
        alike = "" if cost.alike is None else f"{cost.alike:.1%}"
        numbers = (f"{cost.divergence:.2e}", f"{cost.likelihood:+.5f}", f"{cost.cosine:.6f}", alike)
        table.add_row(cost.group, cost.format, *numbers)
    console.print(table)


def _figures(console: Console, result: RunResult) -> None:
    figures = result.figures
    if "bytes_read" not in figures:
        return
    images = f" and {figures['images']} images" if "images" in figures else ""
    console.print(
        f"{figures['ranks']} ranks ran {figures['tokens']} tokens{images} on {figures['device']} in "
        f"{figures['seconds']:.1f} s; {size(figures['bytes_read'])} of shards read in "
        f"{figures['seconds_loading']:.1f} s beside that ({size(figures['bytes_per_second'])}/s), "
        f"{figures['seconds_waited']:.1f} s waited for them, {figures['seconds_waited_reference']:.1f} s for the "
        "reference's weights",
        markup=False,
    )
    words = (
        f"a rank computed for {figures['seconds_computing']:.1f} s and compared for "
        f"{figures['seconds_comparing']:.1f} s; at most {size(figures['peak_memory'])} of memory"
    )
    if "first_token_seconds" in figures:
        words += f"; first token after {figures['first_token_seconds']:.2f} s"
    if figures.get("tokens_per_second"):
        words += f", {figures['token_seconds']:.3f} s a token ({figures['tokens_per_second']:.1f} tokens/s)"
    console.print(words, markup=False)
    memory = figures["memory"]
    measured = "not measured" if memory["measured"] is None else f"{size(memory['measured'])} measured"
    parts = ", ".join(f"{name.replace('_', ' ')} {size(held)}" for name, held in memory["predicted"].items() if held)
    console.print(f"memory of the run: {measured}; predicted at most: {parts}", markup=False)


def _numbers(check: Check) -> tuple[str, str]:
    worst = "nan" if check.worst is None else f"{check.worst:.3g}"
    return worst, f"{check.limit:g}"
