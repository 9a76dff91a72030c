"""The forward engine: stored tensors are read once, in bounded blocks, and each shard tensor gets its part in order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from converter.forward.arranging import Read, arrange
from converter.forward.cutting import parts
from converter.forward.grouping import Target, in_bytes, needed
from converter.forward.units import Unit
from converter.streams.sink import Sink
from shard_plans.checkpoints.checkpoint import Checkpoint
from shard_plans.checkpoints.dtypes import element
from shard_plans.errors import PlanError
from shard_plans.placement.arrangement import rows_filled, widen
from shard_plans.placement.shards import Cut, ShardTensor

Array = np.ndarray[Any, np.dtype[Any]]
Fetch = Callable[[int, int, int, int], memoryview]
"""Reads bytes of a source file: its number, the offset, how many at most, and what they must be a multiple of.

The view holds until the next call.
"""
Taker = tuple[Callable[[Array], None], tuple[Cut, ...]]
"""Who takes part in a stored tensor, and which part."""
Rows = tuple[int, int]


def scatter(
    unit: Unit, sinks: Sequence[Sink], checkpoint: Checkpoint, fetch: Fetch, read: Read, room: int
) -> Iterator[tuple[int, int]]:
    """Fill the unit's slices, one sink each, from the checkpoint; `room` is the most that is fetched at once.

    `read` is for what is drawn from many places, a few bytes at each. Sources go by in the order in which they lie in
    the targets, so what each sink gets arrives in order. Before each stored tensor its file and offset are yielded, so
    that units can take turns in the order of a file.
    """
    group, targets = unit.group, [part.target for part in unit.slices]
    if unit.rows is None:
        yield from _fill(unit, targets, sinks, checkpoint, fetch, read, room)
    else:
        number = int(group.numbers[0])
        yield _place(number, checkpoint)
        takers, item, shape = _takers(targets, sinks, 0, number, checkpoint)
        walk = _Walk(fetch, int(checkpoint.file_numbers[number]), item, room)
        walk.walk(int(checkpoint.starts[number]), shape, takers, unit.rows)
    for sink, part in zip(sinks, unit.slices, strict=True):
        if part.stop == part.target.tensor.nbytes and (unit.rows is not None or not part.target.sources):
            if part.target.tensor.fill is None:
                sink.zeros(part.stop - part.start - sink.seen)
            else:
                sink.take(constant(part.target.tensor))
        if sink.seen != part.stop - part.start:
            raise PlanError(
                f"bytes {part.start} to {part.stop} of shard tensor {part.target.tensor.name} are asked for, "
                f"its sources made {sink.seen}"
            )


def constant(tensor: ShardTensor) -> Array:
    """The elements of a small tensor that holds one value everywhere, as items of whole bytes."""
    raw = element(tensor.dtype, tensor.fill or 0.0)
    return np.frombuffer(raw * (tensor.nbytes // len(raw)), f"<u{len(raw)}")


def _place(number: int, checkpoint: Checkpoint) -> tuple[int, int]:
    return int(checkpoint.file_numbers[number]), int(checkpoint.starts[number])


def _fill(
    unit: Unit, targets: Sequence[Target], sinks: Sequence[Sink], checkpoint: Checkpoint, fetch: Fetch, read: Read,
    room: int,
) -> Iterator[tuple[int, int]]:  # fmt: skip
    """Whole targets, or whole experts of them."""
    per_expert, numbers = unit.members, unit.numbers
    rows = [0] * len(sinks)
    for step, number in enumerate(numbers.tolist()):
        yield _place(number, checkpoint)
        place = step % per_expert
        for position, (sink, target) in enumerate(zip(sinks, targets, strict=True)):
            if place == 0:
                rows[position] = 0
            source = target.sources[place]
            start = source.at[0] if source.at else 0
            sink.zeros((start - rows[position]) * target.row_bytes)
            rows[position] = start + (rows_filled(source, target.each) or 0)
        takers, item, shape = _takers(targets, sinks, place, number, checkpoint)
        file, arranged = int(checkpoint.file_numbers[number]), targets[0].sources[place].arranged
        if arranged is not None:
            arrange(partial(read, file), int(checkpoint.starts[number]), item, arranged, takers, room)
        else:
            _Walk(fetch, file, item, room).walk(int(checkpoint.starts[number]), shape, takers)
        if place == per_expert - 1:
            for position, (sink, target) in enumerate(zip(sinks, targets, strict=True)):
                sink.zeros((target.rows - rows[position]) * target.row_bytes)


def _takers(
    targets: Sequence[Target], sinks: Sequence[Sink], place: int, number: int, checkpoint: Checkpoint
) -> tuple[list[Taker], int, tuple[int, ...]]:
    """Who takes what of a stored tensor, and its items and shape."""
    takers: list[Taker] = []
    item, shape = 1, checkpoint.shapes[number]
    for sink, target in zip(sinks, targets, strict=True):
        source = target.sources[place]
        item, shape, cuts = in_bytes(source.widened or target.tensor.dtype, checkpoint.shapes[number], source.cuts)
        takers.append((partial(_take_wider, sink, 2 * item) if source.widened else sink.take, cuts))
    return takers, item, shape


def _take_wider(sink: Sink, item: int, piece: Array) -> None:
    sink.take(widen(piece, item))


class _Walk:
    """Goes through one stored tensor in blocks that fit the room, whole rows where they fit."""

    def __init__(self, fetch: Fetch, file: int, item: int, room: int) -> None:
        self.fetch, self.file, self.item, self.room = fetch, file, item, room
        self.dtype = np.dtype(f"u{item}")

    def walk(self, offset: int, shape: tuple[int, ...], takers: Sequence[Taker], rows: Rows | None = None) -> None:
        """Give every taker its part of the tensor of `shape` at `offset`, in row-major order; of these rows alone."""
        row = math.prod(shape[1:]) * self.item
        widest = max([row, *(_row_made(cuts) * self.item for _, cuts in takers)])
        low, high = rows or (0, shape[0])
        spans = [(max(a, low), min(b, high)) for a, b in needed([cuts[0] for _, cuts in takers])]
        if widest > self.room and len(shape) > 1:
            self.split(offset, shape, takers, row, spans)
            return
        step = max(1, self.room // max(widest, 1))
        for start, stop in spans:
            first = start
            while first < stop:
                count = min(step, stop - first)
                view = self.fetch(self.file, offset + first * row, count * row, max(row, 1))
                count = len(view) // row if row else count
                block = np.frombuffer(view, self.dtype).reshape(count, *shape[1:])
                for take, cuts in takers:
                    for part in parts(block, first, cuts):
                        take(part)
                first += count

    def split(
        self, offset: int, shape: tuple[int, ...], takers: Sequence[Taker], row: int, spans: Sequence[Rows]
    ) -> None:
        """Walk inside each row, once more for each time that some taker repeats it."""
        for start, stop in spans:
            for index in range(start, stop):
                counts = [times(cuts[0], index) for _, cuts in takers]
                for turn in range(max(counts)):
                    again = [(s, cuts[1:]) for (s, cuts), count in zip(takers, counts, strict=True) if count > turn]
                    self.walk(offset + index * row, shape[1:], again)


def _row_made(cuts: tuple[Cut, ...]) -> int:
    """The most elements that one stored row becomes."""
    return cuts[0].repeat * math.prod(cut.length for cut in cuts[1:])


def times(cut: Cut, index: int) -> int:
    """How often the cut takes the stored index."""
    low, high = index * cut.repeat, (index + 1) * cut.repeat
    return sum(max(0, min(stop, high) - max(start, low)) for start, stop in cut.runs)
