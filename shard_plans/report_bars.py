"""The terminal view of a ledger: one stacked bar a rank, the limit marked; letters, so that it reads without colour."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from shard_plans.console import out
from shard_plans.memory.ledger import LedgerRow
from shard_plans.report import PARTS, alike, span, unit_of

LETTERS = {
    "weights": ("W", "white on blue", "weights"),
    "kv_cache": ("K", "black on green", "KV cache"),
    "activations": ("A", "black on yellow", "activations"),
    "communication": ("C", "white on magenta", "communication"),
    "runtime": ("R", "black on cyan", "runtime"),
}
"""Component -> letter, colours, words."""
MOST_BARS = 64
NARROWEST = 16


def show_bars(rows: Sequence[LedgerRow], console: Console | None = None) -> None:
    """A bar for each run of ranks that need the same; `|` marks what may be used, `]` the card's end."""
    console = console or out()
    if not rows:
        return
    runs = alike(rows)
    largest = max(max(row.total, row.capacity) for _, _, row in runs)
    unit, scale = unit_of(largest)
    labels = [span(first, last) for first, last, _ in runs]
    wide = max(len(label) for label in labels)
    figures = [f"{row.total / scale:.3g} of {row.limit / scale:.3g} {unit}" for _, _, row in runs]
    room = min(console.width, 120) - wide - max(map(len, figures)) - 4
    cells = max(NARROWEST, room)
    legend = Text("ranks".rjust(wide) + "  ")
    for letter, style, words in LETTERS.values():
        legend.append(letter, style)
        legend.append(f" {words}  ")
    legend.append("| may be used  ] card")
    console.print(legend, soft_wrap=True)
    for label, figure, (_, _, row) in list(zip(labels, figures, runs, strict=True))[:MOST_BARS]:
        line = Text(label.rjust(wide) + "  ")
        line.append_text(bar(row, largest, cells))
        line.append(f"  {figure}" + ("" if row.headroom >= 0 else "  too much"), "" if row.headroom >= 0 else "red")
        console.print(line, soft_wrap=True)
    if len(runs) > MOST_BARS:
        console.print(f"... and {len(runs) - MOST_BARS} more kinds of ranks; --json has all")


def bar(row: LedgerRow, largest: int, cells: int) -> Text:
    """One rank as `cells` characters, `largest` bytes wide; every component that is there has a cell at least."""
    drawn = Text()
    ends, held = [], 0
    for part in PARTS:
        held += getattr(row, part)
        ends.append(held)
    at = 0
    for part, end in zip(PARTS, ends, strict=True):
        letter, style, _ = LETTERS[part]
        width = round(end / largest * cells) - at
        if getattr(row, part) > 0 and width <= 0:
            width = 1
        width = max(0, min(width, cells - at))
        drawn.append(letter * width, style)
        at += width
    drawn.append("." * (cells - at), "dim")
    text = drawn.plain
    for mark, place in (("]", row.capacity), ("|", row.limit)):
        cell = min(cells - 1, round(place / largest * cells))
        if cell >= 0:
            drawn = drawn[:cell] + Text(mark, "bold red" if mark == "|" else "bold") + drawn[cell + 1 :]
    return drawn if text else Text(" " * cells)
