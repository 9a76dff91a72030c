"""What the parts found as a table in Markdown, for docs/performance.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.gpu.part import Part


def table(device: str, torch: str, parts: Sequence[Part]) -> str:
    """A row for each part, with its figures, and the failures behind it."""
    lines = [
        f"On {device}, torch {torch}:", "", "| part | tried | failed | seconds | figures |", "|---|---|---|---|---|"
    ]  # fmt: skip
    for part in parts:
        words = "; ".join(f"{name} {shown(value)}" for name, value in part.figures.items())
        failed = "skipped" if part.skipped else len(part.failures)
        row = (part.name, f"{part.done} of {part.of}", failed, part.seconds, part.skipped or words)
        lines.append(f"| {' | '.join(map(str, row))} |")
    return "\n".join([*lines, *(f"- {part.name}: {words}" for part in parts for words in part.failures)])


def shown(value: Any) -> str:
    """A figure in a cell."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {shown(inner)}" for name, inner in value.items())
    return f"{value:.3g}" if isinstance(value, float) else str(value)
