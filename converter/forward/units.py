"""Units of work: groups of shard tensors cut into stretches that are read, written, hashed and vouched for at once.

Where a group is large its targets are split along experts or rows, at places that are chunk borders of all of them,
so that several workers share it, chunks are hashed as they pass, and an interruption loses little.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np

from converter.forward.grouping import Group, Numbers, Target
from converter.streams.hashing import CHUNK, canonical_digest
from shard_plans.checkpoints.checkpoint import Checkpoint
from shard_plans.checkpoints.dtypes import DTYPE_BITS

UNIT = 64 << 20
"""Bytes of a unit, about: it has at least as many where its group has, and more where borders lie far apart."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A stretch of a shard tensor, in bytes of the tensor; it begins at a chunk unless precision changes."""

    target: Target
    start: int
    stop: int

    def pieces(self) -> Iterator[tuple[int, int]]:
        """The stretch cut at the borders of the tensor's chunks; one empty piece where it is empty."""
        first = self.start
        while first < self.stop or first == self.start == self.stop:
            last = min(first - first % CHUNK + CHUNK, self.stop)
            yield first, last
            first = last + (last == first)

    def whole_chunk(self, first: int, last: int) -> bool:
        """Whether a piece is all of a chunk."""
        return first % CHUNK == 0 and (last % CHUNK == 0 or last == self.target.tensor.nbytes)


class HasSlices(Protocol):
    """A unit of any kind."""

    @property
    def slices(self) -> tuple[Slice, ...]:
        """What it writes."""


@dataclass(frozen=True, slots=True)
class Unit:
    """What is done in one go."""

    group: Group
    experts: tuple[int, int] | None
    """Which of the stacked experts, where experts are stacked."""
    rows: tuple[int, int] | None
    """Which rows of the stored tensor, where the group is split along them."""
    slices: tuple[Slice, ...]

    @property
    def nbytes(self) -> int:
        """Bytes written."""
        return sum(part.stop - part.start for part in self.slices)

    @property
    def extra(self) -> int:
        """Bytes behind the digests of its entry in the journal."""
        return 0

    @property
    def members(self) -> int:
        """Stored tensors that each target, or each expert of it, is made of."""
        return max((len(part.target.sources) for part in self.slices), default=0)

    @property
    def numbers(self) -> Numbers:
        """The stored tensors that it is made of, in order."""
        first, last = self.experts or (0, 0)
        return self.group.numbers[first * self.members : last * self.members] if self.experts else self.group.numbers


def make_units(groups: Sequence[Group], checkpoint: Checkpoint, size: int | None = None) -> list[Unit]:
    """All units, in the order of what they read."""
    return [unit for group in groups for unit in _units(group, checkpoint, size or UNIT)]


def units_digest(units: Sequence[HasSlices]) -> str:
    """Digest of what the units are: a journal of others doesn't hold for them."""
    return canonical_digest(
        [[[part.target.file, part.target.index, part.start, part.stop] for part in unit.slices] for unit in units]
    )


def _units(group: Group, checkpoint: Checkpoint, size: int) -> Iterator[Unit]:
    whole = sum(target.tensor.nbytes for target in group.targets)
    stacked = group.targets[0].stacked
    if stacked is not None and (whole <= size or not whole):
        borders = [0, stacked]
    elif stacked is not None:
        borders = _expert_borders(group, stacked, size)
    elif whole > size and _splits(group, checkpoint):
        yield from _row_units(group, checkpoint, size)
        return
    else:
        yield Unit(group, None, None, tuple(Slice(target, 0, target.tensor.nbytes) for target in group.targets))
        return
    for first, last in pairwise(borders):
        slices = []
        for target in group.targets:
            each = target.tensor.nbytes // stacked if stacked else 0
            slices.append(Slice(target, first * each, last * each))
        yield Unit(group, (first, last), None, tuple(slices))


def _expert_borders(group: Group, experts: int, size: int) -> list[int]:
    """Numbers of experts at which the bytes of every target come to a whole number of chunks."""
    each = [target.tensor.nbytes // experts for target in group.targets]
    step = math.lcm(*(CHUNK // math.gcd(count, CHUNK) for count in each))
    step *= max(1, size // (step * sum(each)))
    return [*range(0, experts, step), experts]


def _splits(group: Group, checkpoint: Checkpoint) -> bool:
    """Whether the group can be split along the rows of the one stored tensor that it is made of."""
    if len(group.numbers) != 1:
        return False
    number = int(group.numbers[0])
    plain = len(checkpoint.shapes[number]) > 0 and DTYPE_BITS[checkpoint.dtypes[number]] >= 8
    sources = [target.sources[0] for target in group.targets]
    return plain and all(
        source.cuts[0].repeat == 1 and not any(source.at) and source.arranged is None for source in sources
    )


def _row_units(group: Group, checkpoint: Checkpoint, size: int) -> Iterator[Unit]:
    rows = checkpoint.shapes[int(group.numbers[0])][0]
    candidates: set[int] = set()
    for target in group.targets:
        step = CHUNK // math.gcd(target.row_bytes, CHUNK)
        passed = 0
        for start, stop in target.sources[0].cuts[0].runs:
            candidates |= {start, stop, *range(start + -passed % step, stop, step)}
            passed += stop - start
    inner = np.array(sorted(candidates - {0, rows}), np.int64)
    ends = [_ends(target, np.append(inner, rows)) for target in group.targets]
    good = np.ones(len(inner), np.bool_)
    for target, end in zip(group.targets, ends, strict=True):
        good &= (end[:-1] % CHUNK == 0) | (end[:-1] == target.tensor.nbytes)
    first, begun = 0, [0] * len(group.targets)
    for position in [*np.flatnonzero(good).tolist(), len(inner)]:
        stops = [int(end[position]) for end in ends]
        if position < len(inner) and sum(stops) - sum(begun) < size:
            continue
        last = int(inner[position]) if position < len(inner) else rows
        parts = [
            Slice(target, start, stop)
            for target, start, stop in zip(group.targets, begun, stops, strict=True)
            if start < stop or (not first and not target.tensor.nbytes)
        ]
        yield Unit(group, None, (first, last), tuple(parts))
        first, begun = last, stops


def _ends(target: Target, borders: Numbers) -> Numbers:
    """How many bytes of the target come of the stored rows before each border; padding comes with the last row."""
    taken = np.zeros(len(borders), np.int64)
    for start, stop in target.sources[0].cuts[0].runs:
        taken += np.clip(borders, start, stop) - start
    total = target.sources[0].cuts[0].length
    return np.where(taken == total, target.tensor.nbytes, taken * target.row_bytes)
