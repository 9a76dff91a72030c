"""How a part of a stored tensor lies in a shard tensor: which of its indexes are where, dimension by dimension."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

from shard_plans.checkpoints.dtypes import DTYPE_BITS
from shard_plans.errors import ManifestError
from shard_plans.placement.arrangement import Arrangement
from shard_plans.placement.shards import Cut

Span = tuple[int, int]
"""Half-open range along one dimension."""
CELLS = 1 << 26
"""Pieces between all borders of a stored tensor, at most."""
Region = tuple[tuple[Span, ...], ...]
"""A product of stored indexes: ascending ranges of each dimension."""


@dataclass(frozen=True, slots=True)
class Match:
    """Stored indexes `start` to `stop` lie at `place`, `place` + `step`, ... of the part."""

    start: int
    stop: int
    place: int
    step: int


@dataclass(frozen=True, eq=False)
class Layout:
    """One part, cut out of a stored tensor: its rows follow one another in the shard tensor. No two are equal."""

    item: int
    """Bytes of an item; types below a byte are counted in bytes."""
    stored: tuple[int, ...]
    """Shape of the stored tensor in items; a scalar is one row."""
    cuts: tuple[Cut, ...]
    """One for each dimension, in items."""
    arranged: Arrangement | None = None
    """How the numbers are ordered in the shard, where not as stored; `stored` is then the shape they are read as."""
    widened: int = 0
    """Bytes of an item in the shard, where that is wider than the stored one."""

    @property
    def held(self) -> int:
        """Bytes of an item in the shard."""
        return self.widened or self.item

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Extent of the part."""
        return tuple(cut.length for cut in self.cuts)

    @cached_property
    def units(self) -> tuple[int, ...]:
        """Bytes from one index of each dimension to the next, in the shard."""
        axes = self.arranged.axes if self.arranged is not None else tuple(range(len(self.shape)))
        ordered = [self.shape[axis] for axis in axes]
        return tuple(math.prod(ordered[axes.index(axis) + 1 :]) * self.held for axis in range(len(axes)))

    @cached_property
    def matches(self) -> tuple[tuple[Match, ...], ...]:
        """Of each dimension, ascending."""
        return tuple(tuple(_matches(cut)) for cut in self.cuts)

    @cached_property
    def inner(self) -> tuple[tuple[tuple[tuple[slice, ...], tuple[slice, ...]], ...], ...]:
        """Of each dimension, what lies behind it: pairs of places in the stored tensor and in the part."""
        return tuple(
            tuple(
                (
                    (slice(None), *(slice(m.start, m.stop) for m in chosen)),
                    (slice(None), *(slice(m.place, m.place + (m.stop - m.start) * m.step, m.step) for m in chosen)),
                )
                for chosen in product(*self.matches[axis + 1 :])
            )
            for axis in range(len(self.cuts))
        )

    @cached_property
    def straight(self) -> bool:
        """Whether the part is whole rows of the stored tensor, as they are: bytes that follow one another in both."""
        first, *rest = self.cuts
        return (
            self.arranged is None
            and self.held == self.item
            and first.repeat == 1
            and len(first.runs) == 1
            and all(cut == Cut(((0, size),)) for cut, size in zip(rest, self.stored[1:], strict=True))
        )

    @cached_property
    def region(self) -> Region:
        """The stored indexes that it holds."""
        return stored_region(self.cuts)


def _matches(cut: Cut) -> Iterator[Match]:
    passed = 0
    for start, stop in cut.runs:
        first, place = start // cut.repeat, passed
        if start % cut.repeat and start < stop:  # of the first stored element only the last repeats are there
            yield Match(first, first + 1, place, cut.repeat)
            place += (first + 1) * cut.repeat - start
            first += 1
        if max(start, first * cut.repeat) < stop:
            yield Match(first, -(-stop // cut.repeat), place, cut.repeat)
        passed += stop - start


def clip(matches: Sequence[Match], low: int, high: int) -> Iterator[Match]:
    """The matches within the stored indexes `low` to `high`."""
    for match in matches:
        start, stop = max(match.start, low), min(match.stop, high)
        if start < stop:
            yield Match(start, stop, match.place + (start - match.start) * match.step, match.step)


def stored_region(cuts: Sequence[Cut]) -> Region:
    """The stored indexes that cuts take; a scalar is one row."""
    if not cuts:
        return (((0, 1),),)
    return tuple(tuple((a // cut.repeat, -(-b // cut.repeat)) for a, b in cut.runs if a < b) for cut in cuts)


def in_items(dtype: str, stored: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Bytes of an item and a stored shape in items: a scalar is one row, types below a byte are counted in bytes."""
    bits = DTYPE_BITS[dtype]
    if bits >= 8:
        return bits // 8, stored or (1,)
    if not stored or stored[-1] * bits % 8:
        raise ManifestError(f"is {dtype} {list(stored)}, whose rows don't end with a byte")
    return 1, (*stored[:-1], stored[-1] * bits // 8)


def read_as(dtype: str, stored: tuple[int, ...], layouts: Iterable[Layout]) -> tuple[int, ...]:
    """The shape, in items, that all these parts of a stored tensor read it as. Raises ManifestError."""
    shapes = {layout.stored for layout in layouts} or {in_items(dtype, stored)[1]}
    if len(shapes) > 1:
        raise ManifestError(f"a stored tensor of {list(stored)} is read as {sorted(map(list, shapes))}")
    return shapes.pop()


def make_layout(
    dtype: str, stored: tuple[int, ...], cuts: tuple[Cut, ...], arranged: Arrangement | None = None, held: str = ""
) -> Layout:
    """The layout of a part that was cut out of a stored tensor of that type and shape. Raises ManifestError.

    `held`: the type in the shard, where that is a wider one.
    """
    widened = DTYPE_BITS[held] // 8 if held and held != dtype else 0
    if arranged is not None:
        if DTYPE_BITS[dtype] < 8 or math.prod(arranged.view) != math.prod(stored):
            raise ManifestError(f"is read as {list(arranged.view)}, but stored as {dtype} {list(stored)}")
        return Layout(DTYPE_BITS[dtype] // 8, arranged.view, cuts, arranged, widened)
    if len(stored) != len(cuts) or any(
        cut.runs and cut.runs[-1][1] > size * cut.repeat for cut, size in zip(cuts, stored, strict=True)
    ):
        raise ManifestError(f"is cut at {[cut.runs for cut in cuts]}, but stored as {list(stored)}")
    item, shape = in_items(dtype, stored)
    if not stored:
        return Layout(item, shape, (Cut(((0, 1),)),), None, widened)
    bits = DTYPE_BITS[dtype]
    if bits >= 8:
        return Layout(item, shape, cuts, None, widened)
    borders = [border * bits for run in cuts[-1].runs for border in run]
    if any(border % 8 for border in borders) or cuts[-1].repeat != 1:
        raise ManifestError(f"is {dtype} {list(stored)} cut at {cuts[-1].runs}, inside a byte")
    runs = tuple((start * bits // 8, stop * bits // 8) for start, stop in cuts[-1].runs)
    return Layout(item, shape, (*cuts[:-1], Cut(runs)))


def uncovered(wanted: Region, held: Sequence[Region]) -> tuple[int, ...] | None:
    """The first index of `wanted` that lies in none of the regions held; None where all do."""
    axes = range(len(wanted))
    borders = [
        sorted({border for region in (wanted, *held) for span in region[axis] for border in span}) for axis in axes
    ]
    shape = [max(len(border) - 1, 0) for border in borders]
    if 0 in shape:
        return None
    if math.prod(shape) > CELLS:
        raise ManifestError(f"a stored tensor is cut at {' x '.join(map(str, shape))} places, which is no plan's way")

    def cells(region: Region) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        made = np.ones((), np.bool_)
        for axis in axes:
            along = np.zeros(shape[axis], np.bool_)
            for start, stop in region[axis]:
                along[np.searchsorted(borders[axis], start) : np.searchsorted(borders[axis], stop)] = True
            made = made[..., None] & along
        return made

    missing = cells(wanted)
    for region in held:
        missing &= ~cells(region)
        if not missing.any():
            return None
    found = np.argwhere(missing)
    return tuple(borders[axis][int(at)] for axis, at in enumerate(found[0])) if len(found) else None


def rectangles(shape: Sequence[int], first: int, stop: int) -> Iterator[tuple[Span, ...]]:
    """The items `first` to `stop`, counted in row-major order, as rectangles that follow one another."""
    if first >= stop:
        return
    if len(shape) == 1:
        yield ((first, stop),)
        return
    row = math.prod(shape[1:])
    begin, end = -(-first // row), stop // row
    if begin > end:  # all within one row
        for rest in rectangles(shape[1:], first - end * row, stop - end * row):
            yield ((end, end + 1), *rest)
        return
    for rest in rectangles(shape[1:], first - (begin - 1) * row, row) if first % row else ():
        yield ((begin - 1, begin), *rest)
    if begin < end:
        yield ((begin, end), *((0, size) for size in shape[1:]))
    for rest in rectangles(shape[1:], 0, stop - end * row):
        yield ((end, end + 1), *rest)
