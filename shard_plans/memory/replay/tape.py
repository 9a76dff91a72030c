"""Shapes instead of tensors, and a count of the bytes that live: memory is given back when nothing refers to it.

The blocks of this package are written as the runtime's are, operation for operation, so that their temporaries live as
long. They share no code with it: a test compares the two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(slots=True)
class Tape:
    """Bytes that live now, and the most that ever did."""

    compute: int
    """Bytes of a number in the compute type: 2, 4 or 8."""
    now: int = 0
    peak: int = 0

    @property
    def wide(self) -> int:
        """Bytes of a number where norms, scores and softmax are computed: fp32 or wider."""
        return max(4, self.compute)

    def new(self, *shape: int, bytes: int | None = None) -> Shape:
        """A new piece of memory; in the compute type where `bytes` of a number aren't said."""
        each = self.compute if bytes is None else bytes
        return Shape(shape, each, Storage(self, math.prod(shape) * each))

    def outside(self, shape: tuple[int, ...], bytes: int) -> Shape:
        """What lives outside the pass, such as loaded weights: it isn't counted."""
        return Shape(shape, bytes, Storage(self, 0))


@dataclass(slots=True, eq=False)
class Storage:
    """A piece of memory, counted until nothing refers to it."""

    tape: Tape
    size: int

    def __post_init__(self) -> None:
        self.tape.now += self.size
        self.tape.peak = max(self.tape.peak, self.tape.now)

    def __del__(self) -> None:
        self.tape.now -= self.size


@dataclass(slots=True, eq=False)
class Shape:
    """A tensor without its numbers."""

    shape: tuple[int, ...]
    bytes: int
    """Of one number."""
    storage: Storage = field(repr=False)

    @property
    def rows(self) -> int:
        """Its first extent."""
        return self.shape[0]

    @property
    def tape(self) -> Tape:
        """What counts it."""
        return self.storage.tape

    def view(self, *shape: int) -> Shape:
        """Another look at the same memory."""
        return Shape(shape, self.bytes, self.storage)

    def to(self, bytes: int) -> Shape:
        """In numbers of so many bytes: itself where it is."""
        return self if bytes == self.bytes else self.like(bytes)

    def like(self, bytes: int | None = None) -> Shape:
        """A new one of this shape: what an operation makes of it, number by number."""
        return self.tape.new(*self.shape, bytes=self.bytes if bytes is None else bytes)

    def sums(self) -> Shape:
        """A new one with a single number for each row of the last dimension, which is kept."""
        return self.tape.new(*self.shape[:-1], 1, bytes=self.bytes)


def made(shape: Shape, *read: Shape) -> Shape:
    """A new one of this shape; `read` is what the operation reads, and lives until it is done."""
    return shape.like()
