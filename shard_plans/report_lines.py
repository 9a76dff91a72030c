"""`plan-memory --by`: the ledger of the fullest rank of each stage, by stage, layer or operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click
from rich.table import Table

from shard_plans.console import out, show_figures
from shard_plans.memory.count import Lines

Command = TypeVar("Command", bound=Callable[..., Any])
BY = ("rank", "stage", "layer", "operator")
by_option = click.option(
    "--by", default="rank", show_default=True, type=click.Choice(BY),
    help="Lines of the ledger; all but rank show the fullest rank of each stage.",
)  # fmt: skip


def lines_json(by: str, lines: Sequence[Lines]) -> dict[str, Any]:
    """The keys `by` and `lines` of --json; nothing where the ranks say all."""
    if by == "rank":
        return {}
    return {
        "by": by,
        "lines": [
            {
                "stage": each.stage, "rank": each.rank, "component": item.component,
                "operator": item.operator or None, "layer": item.layer,
                "low": item.amount.low, "typical": item.amount.typical, "high": item.amount.high,
                "source": item.source or None,
            }
            for each in lines
            for item in each.items
        ],
    }  # fmt: skip


def show_lines(by: str, lines: Sequence[Lines]) -> None:
    """A table for each stage; neighbouring layers that need the same share a line."""
    for each in lines if by != "rank" else ():
        title = f"stage {each.stage}, rank {each.rank}, bytes by {by}"
        table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="")
        for head in ("layers" if by == "layer" else by, "component", "bytes", "low to high"):
            table.add_column(head, justify="right" if head in ("bytes", "low to high") else "left", no_wrap=True)
        for name, component, amount, low, high in _rows(by, each):
            spread = "" if low == high else f"{low:,} to {high:,}"
            table.add_row(name, component, f"{amount:,}", spread)
        show_figures(table)
    if by == "operator":
        ranges = {item.operator: item.source for each in lines for item in each.items if item.source}
        for operator, source in ranges.items():
            out().print(f"{operator}: {source}", highlight=False)


def _rows(by: str, lines: Lines) -> list[tuple[str, str, int, int, int]]:
    """Name, component, typical, low, high; in a table by layer equal neighbours are one row."""
    if by != "layer":
        return [
            (
                item.operator or f"stage {lines.stage}",
                item.component,
                item.amount.typical,
                item.amount.low,
                item.amount.high,
            )
            for item in lines.items
        ]
    layers: dict[int | None, dict[str, Any]] = {}
    for item in lines.items:
        layers.setdefault(item.layer, {})[item.component] = item.amount
    runs: list[tuple[int | None, int | None, dict[str, Any]]] = []
    for layer, parts in sorted(layers.items(), key=lambda found: (found[0] is None, found[0] or 0)):
        last = runs[-1] if runs else None
        if last is not None and layer is not None and last[1] == layer - 1 and last[2] == parts:
            runs[-1] = (last[0], layer, parts)
        else:
            runs.append((layer, layer, parts))
    rows = []
    for first, end, parts in runs:
        name = "none" if first is None else str(first) if first == end else f"{first}-{end}, each"
        rows += [(name, component, a.typical, a.low, a.high) for component, a in parts.items()]
    return rows
