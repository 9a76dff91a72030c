"""The table in words: a line for each place, and a Markdown row for each bug over all of its places."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from tests.mutations.run import Cell

TITLE = "| bug | models | places | caught at its place | first to fail | by |\n|---|---|---|---|---|---|"


def line(cell: Cell) -> str:
    """One place."""
    found = cell.finding
    verdict = "MISSED" if not found.caught else "caught" if found.pinned else "ELSEWHERE"
    by = ", ".join(found.by)
    return f"{verdict:9} {cell.bug.name:34} {cell.family:17} {cell.place:40} {by}: {found.where[:150]}"


def markdown(cells: Sequence[Cell]) -> str:
    """All places, bug after bug."""
    names = dict.fromkeys(cell.bug.name for cell in cells)
    return "\n".join([TITLE, *(row([cell for cell in cells if cell.bug.name == name]) for name in names)])


def row(cells: Sequence[Cell]) -> str:
    """The places of one bug."""
    bug, right = cells[0].bug, sum(cell.finding.caught and cell.finding.pinned for cell in cells)
    families = len({cell.family for cell in cells})
    name = bug.name + (f" ({bug.like})" if bug.like else "") + (", in float64" if bug.compute == "float64" else "")
    checks = often(check for cell in cells for check in cell.finding.by if check != "bytes")
    return f"| {name} | {families} | {len(cells)} | {right} | {often(map(first, cells))} | {checks} |"


def first(cell: Cell) -> str:
    """The operator, or the place outside of layers, that is named first."""
    where, by = cell.finding.where, cell.finding.by
    if by == ("refused",):
        return "refused"
    seen = re.match(r"the tower's ([a-z]+(?: \d+, [a-z]+)?)|(the images' tokens|deep features|places)", where)
    if seen is not None:
        return re.sub(r" \d+", "", seen[1] or seen[2])
    found = re.match(
        r"layer \d+, rank \d+, (?!token)([a-z][\w.]+)|(embedding|handed)|rank \d+: layer \d+, ([a-z][\w.]+)", where
    )
    if found is None:
        return "not run" if ": run by" in where else next((name for name in by if name != "bytes"), "")
    return found[1] or found[2] or found[3]


def often(words: Iterable[str]) -> str:
    """Different words, the most frequent first."""
    return ", ".join(word for word, _ in Counter(words).most_common())
