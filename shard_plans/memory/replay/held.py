"""The matrices that a rank holds, as stored, and what reading them in the compute type takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shard_plans.errors import FamilyError
from shard_plans.memory.replay.tape import Shape, Tape


@dataclass(frozen=True, slots=True)
class Held:
    """One parameter of a rank, or one expert's part of it."""

    shape: tuple[int, ...]
    """Of its values."""
    bytes: int
    """Of a stored value."""
    format: str | None = None
    block: tuple[int, int] | None = None
    scale_bytes: int = 4

    def dense(self, tape: Tape, bytes: int | None = None) -> Shape:
        """The values in the compute type, or in numbers of so many bytes; nothing is taken where they are stored so.

        Raises FamilyError for a format whose reading isn't replayed.
        """
        wanted = tape.compute if bytes is None else bytes
        if self.format is None:
            return tape.outside(self.shape, self.bytes).to(wanted)
        if self.format != "fp8_block" or self.block is None:
            raise FamilyError(f"the memory of reading {self.format} weights isn't replayed")
        rows, columns = self.shape
        down, across = self.block
        grid = -(-rows // down), -(-columns // across)
        wide = self._repeated(tape, grid[0], grid[1] * across)
        wide = tape.new(grid[0] * down, columns, bytes=4)
        return _scaled(tape, self.shape, wide).to(wanted)

    def _repeated(self, tape: Tape, rows: int, columns: int) -> Shape:
        scale = tape.outside((rows,), self.scale_bytes).to(4)
        return _along(tape, rows, columns, scale)


def _along(tape: Tape, rows: int, columns: int, scale: Shape) -> Shape:
    return tape.new(rows, columns, bytes=4)


def _scaled(tape: Tape, shape: tuple[int, ...], scales: Shape) -> Shape:
    return tape.new(*shape, bytes=4)


Weights = Mapping[str, Held]
"""Native name without its layer -> what the rank holds of it; experts' matrices as one expert has them."""
