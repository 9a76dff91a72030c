"""The matrices that a rank holds, as stored, and what reading them in the compute type takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shard_plans.errors import FamilyError
from shard_plans.memory.replay.tape import Shape, Tape, made

SCALED = ("fp8_block", "fp8_channel", "int8_channel")
"""Formats whose reading is replayed: a byte a value, and scales."""


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
        if self.format not in SCALED or self.block is None:
            raise FamilyError(f"the memory of reading {self.format} weights isn't replayed")
        rows, columns = self.shape
        down, across = self.block
        grid = -(-rows // down), -(-columns // across)
        numbers = tape.new(*self.shape, bytes=4)
        factors = tape.outside(grid, self.scale_bytes).to(4)
        wide = tape.new(grid[0], grid[1] * across, bytes=4)
        wide = made(tape.outside((grid[0] * down, columns), 4), wide)
        return _multiplied(numbers, wide, factors).to(wanted)


def _multiplied(numbers: Shape, *read: Shape) -> Shape:
    """The same memory, multiplied in place."""
    return numbers


Weights = Mapping[str, Held]
"""Native name without its layer -> what the rank holds of it; experts' matrices as one expert has them."""
