"""What would fit where the plan doesn't: each remedy with its numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Remedy:
    """One thing to change."""

    kind: str
    """cards, context, concurrency, kv_dtype, weights or offload."""
    text: str
    """A sentence with the numbers."""
    value: int | str | None = None
    """The number or word to give instead; None where this alone doesn't help."""
