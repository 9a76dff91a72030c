"""What cuts take of an array: rows of it, and stretches along its other dimensions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from shard_plans.placement.shards import Cut

Array = np.ndarray[Any, np.dtype[Any]]


def parts(block: Array, first: int, cuts: tuple[Cut, ...]) -> Iterator[Array]:
    """What the cuts take of the stored rows `first`, `first` + 1, ... in `block`: pieces that follow one another."""
    repeat = cuts[0].repeat
    low, high = first * repeat, (first + len(block)) * repeat
    for start, stop in cuts[0].runs:
        a, b = max(start, low), min(stop, high)
        if a >= b:
            continue
        rows = block[a // repeat - first : -(-b // repeat) - first]
        for axis in range(1, block.ndim):
            rows = along(rows, axis, cuts[axis])
        if repeat > 1:
            skip = a % repeat
            rows = np.repeat(rows, repeat, axis=0)[skip : skip + b - a]
        yield rows


def along(array: Array, axis: int, cut: Cut) -> Array:
    """What the cut takes along one whole dimension: a view where it is one run."""
    pieces = []
    for start, stop in cut.runs:
        first, repeat = start // cut.repeat, cut.repeat
        index = (slice(None),) * axis + (slice(first, -(-stop // repeat)),)
        piece = array[index]
        if repeat > 1:
            inner = (slice(None),) * axis + (slice(start - first * repeat, stop - first * repeat),)
            piece = np.repeat(piece, repeat, axis=axis)[inner]
        pieces.append(piece)
    if len(pieces) == 1:
        return pieces[0]
    return np.concatenate(pieces, axis=axis) if pieces else array[(slice(None),) * axis + (slice(0, 0),)]
