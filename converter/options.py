"""How a conversion is to be done: none of this changes a byte of what a rank reads."""

from __future__ import annotations

from dataclasses import dataclass

from converter.output.parts import Part

WHOLE = Part()


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """Beside checkpoint, plan and output."""

    ranks: tuple[int, ...] | None = None
    """Only the files of these ranks; None: of all."""
    fresh: bool = False
    """Begin again instead of going on with what an interrupted conversion left."""
    part: Part = WHOLE
    """Which part of the files this process makes; the one that finishes last writes the root manifest."""
    buffer: int = 16 << 20
    """Bytes that each worker reads, and writes, at a time; less where all workers together would take too much."""
    sha256: bool = False
    """Write SHA256SUMS beside the finished output."""
