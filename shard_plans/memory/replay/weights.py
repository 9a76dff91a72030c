"""The matrices that a rank holds, as stored, and what their use in the compute type takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shard_plans.checkpoints.dtypes import DTYPE_BITS
from shard_plans.errors import FamilyError
from shard_plans.memory.replay.tape import Shape, Tape


@dataclass(frozen=True, slots=True)
class Held:
    """One parameter of a rank, or one expert's part of it."""

    shape: tuple[int, ...]
    """Of its values, unpacked."""
    bits: int
    """Of a stored value."""
    format: str | None = None
    block: tuple[int, int] | None = None
    scale_bits: int = 0

    def dense(self, tape: Tape) -> Shape:
        """The values in the compute type; nothing is taken where they are stored in it."""
        return self.as_type(tape, tape.compute)

    def as_type(self, tape: Tape, bytes: int) -> Shape:
        """The values in numbers of so many bytes. Raises FamilyError for a format whose reading isn't replayed."""
        if self.format is None:
            return stored(tape, self.shape, self.bits // 8).to(bytes)
        if self.format != "fp8_block" or self.block is None:
            raise FamilyError(f"the memory of reading {self.format} weights isn't replayed")
        rows, columns = self.shape[-2:]
        down, across = self.block
        grid = -(-rows // down), -(-columns // across)
        scale = stored(tape, grid, self.scale_bits // 8).to(4)
        wide = tape.new(grid[0], grid[1] * across, bytes=4)
        del scale
        wide = tape.new(grid[0] * down, columns, bytes=4)
        return _scaled(tape, self.shape, wide).to(bytes)


def _scaled(tape: Tape, shape: tuple[int, ...], wide: Shape) -> Shape:
    return tape.new(*shape, bytes=4)


def stored(tape: Tape, shape: tuple[int, ...], bytes: int) -> Shape:
    """What a loader holds: it lives outside the pass, so the tape doesn't count it."""
    outside = Tape(tape.compute)
    found = outside.new(*shape, bytes=bytes)
    found.storage.tape = outside
    return Outside(found.shape, found.bytes, found.storage, tape)


@dataclass(slots=True, eq=False)
class Outside(Shape):
    """A stored tensor: what is made of it is counted, it isn't."""

    inside: Tape

    def like(self, bytes: int | None = None) -> Shape:
        """A new one of this shape on the pass's own tape."""
        return self.inside.new(*self.shape, bytes=self.bytes if bytes is None else bytes)


Weights = Mapping[str, Held]
"""Role -> what the rank holds of it; an expert's matrices as one expert has them."""


def parts(bits: str) -> int:
    """Bits of a stored type."""
    return DTYPE_BITS[bits]
