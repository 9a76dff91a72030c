"""The forward engine where numbers change their order: bands of the target's slowest dimension, in its order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from converter.forward.cutting import along
from converter.forward.grouping import needed
from shard_plans.placement.arrangement import Arrangement
from shard_plans.placement.shards import Cut

Array = np.ndarray[Any, np.dtype[Any]]
Read = Callable[[int, int, memoryview], object]
"""Fills a view with the bytes from an offset of a source file: its number, the offset, the view."""


def arrange(
    read: Callable[[int, memoryview], object],
    start: int,
    item: int,
    arranged: Arrangement,
    takers: Sequence[tuple[Callable[[Array], None], tuple[Cut, ...]]],
    room: int,
) -> None:
    """Give every taker its part of the stored tensor at `start`, in the order of the arrangement.

    What is held at a time is a band of the dimension that varies slowest in the target: at most `room` bytes, unless
    one index of it has more.
    """
    view, slowest = arranged.view, arranged.axes[0]
    step = max(1, room * view[slowest] // max(1, math.prod(view) * item))
    for low, high in needed([cuts[slowest] for _, cuts in takers]):
        for first in range(low, high, step):
            last = min(first + step, high)
            band = _box(read, start, item, view, slowest, (first, last))
            for take, cuts in takers:
                part = band
                for axis, cut in enumerate(cuts):
                    part = along(part, axis, _within(cut, first, last) if axis == slowest else cut)
                take(np.ascontiguousarray(arranged.laid(part)).reshape(-1))


def _within(cut: Cut, first: int, last: int) -> Cut:
    """What a cut takes of a band, counted from where that begins."""
    runs = ((max(start, first) - first, min(stop, last) - first) for start, stop in cut.runs)
    return Cut(tuple((start, stop) for start, stop in runs if start < stop))


def _box(
    read: Callable[[int, memoryview], object], start: int, item: int, view: Sequence[int], axis: int,
    span: tuple[int, int],
) -> Array:  # fmt: skip
    """The stored numbers whose index along one dimension of the view lies in a span, as items of whole bytes."""
    count = span[1] - span[0]
    held = np.empty((*view[:axis], count, *view[axis + 1 :]), f"<u{item}")
    behind = math.prod(view[axis + 1 :]) * item
    run = count * behind
    bytes_of = held.reshape(-1).view(np.uint8).data
    for number, offset in enumerate(_offsets(view[:axis], view[axis] * behind)):
        read(start + offset + span[0] * behind, bytes_of[number * run : (number + 1) * run])
    return held


def _offsets(outer: Sequence[int], unit: int) -> Iterator[int]:
    """Where each index of the dimensions before begins."""
    return (number * unit for number in range(math.prod(outer)))
