"""Numbers in another order, or in a wider type, than they are stored in, as some consumers hold them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

if TYPE_CHECKING:
    from shard_plans.placement.shards import Cut

Array = np.ndarray[Any, np.dtype[Any]]
T = TypeVar("T")
WIDENED = {"BF16": "F32"}
"""Type -> the wider one that holds each of its numbers with zero bits behind it."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A stored tensor (of one expert, where they are stacked) read as another shape, and its dimensions exchanged."""

    view: tuple[int, ...]
    """The shape that it is read as: the same numbers in row-major order."""
    axes: tuple[int, ...]
    """Dimensions of the view, from the slowest to the fastest of the shard tensor."""

    def ordered(self, values: Sequence[T]) -> tuple[T, ...]:
        """What belongs to the dimensions of the view, in the order of the shard tensor."""
        return tuple(values[axis] for axis in self.axes)

    def laid(self, array: Array) -> Array:
        """An array in the shape of the view with its dimensions in the order of the shard tensor."""
        return array.transpose(self.axes)

    def seen(self, array: Array) -> Array:
        """The way back."""
        return array.transpose(np.argsort(self.axes))

    def entry(self) -> Arrangement:
        """The same of one entry of a tensor that stacks several."""
        return Arrangement((1, *self.view), (0, *(axis + 1 for axis in self.axes)))


class Region(Protocol):
    """What a source and its record in a manifest have in common."""

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """One a dimension of the stored tensor, or of the shape that it is read as."""

    @property
    def at(self) -> tuple[int, ...]:
        """Where the region begins in the shard tensor."""

    @property
    def arranged(self) -> Arrangement | None:
        """How its numbers are ordered, where that isn't as stored."""


def rows_filled(region: Region, shape: Sequence[int]) -> int | None:
    """Rows of a shard tensor of that shape (of one expert) that a region fills; None where these aren't whole rows."""
    lengths = tuple(cut.length for cut in region.cuts)
    if any(region.at[1:]):
        return None
    if region.arranged is None:
        return (lengths[0] if lengths else 1) if lengths[1:] == tuple(shape[1:]) else None
    row, size = math.prod(shape[1:]), math.prod(lengths)
    return size // row if row and size % row == 0 else None


def widen(array: Array, item: int) -> Array:
    """Items of that many bytes with the bits of the given ones in front, zeros behind."""
    return array if array.itemsize == item else array.astype(f"<u{item}") << (8 * (item - array.itemsize))


def narrow(array: Array, item: int) -> Array:
    """The first bits of each item, as items of so many bytes."""
    return array if array.itemsize == item else (array >> (8 * (array.itemsize - item))).astype(f"<u{item}")
