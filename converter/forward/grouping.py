"""Shard tensors grouped by what they draw on, so that each stored tensor is read once for all that need it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from converter.forward.shard_file import FileLayout
from shard_plans.checkpoints.checkpoint import Checkpoint
from shard_plans.checkpoints.dtypes import DTYPE_BITS
from shard_plans.errors import PlanError
from shard_plans.placement.arrangement import WIDENED, rows_filled
from shard_plans.placement.shards import Cut, ShardTensor, Source

Numbers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Target:
    """One shard tensor to be written."""

    file: int
    """Number of its file."""
    index: int
    """Its number in the file."""
    tensor: ShardTensor
    sources: tuple[Source, ...]
    """In the order in which they lie in the tensor."""
    start: int
    """Absolute byte offset in the file."""

    @property
    def stacked(self) -> int | None:
        """Experts that are stacked along the first dimension; None where the tensor isn't stacked."""
        return len(self.tensor.shape) and self.tensor.shape[0] if is_stacked(self.tensor) else None

    @property
    def each(self) -> tuple[int, ...]:
        """Its shape; that of one expert, where experts are stacked."""
        return self.tensor.shape[1:] if is_stacked(self.tensor) else self.tensor.shape

    @property
    def row_bytes(self) -> int:
        """Bytes of one row: of everything behind the dimension along which sources follow one another."""
        return math.prod(self.each[1:]) * DTYPE_BITS[self.tensor.dtype] // 8

    @property
    def rows(self) -> int:
        """Rows (of one expert, where experts are stacked)."""
        return self.each[0] if self.each else 1


@dataclass(frozen=True, slots=True)
class Group:
    """Shard tensors that are made of the same stored tensors, in the same order."""

    numbers: Numbers
    """Those stored tensors; where experts are stacked, all of the first expert, then all of the second, ..."""
    targets: tuple[Target, ...]

    @property
    def converted(self) -> bool:
        """Whether precision changes on the way."""
        return any(source.converted is not None for target in self.targets for source in target.sources)


def is_stacked(tensor: ShardTensor) -> bool:
    """Whether the first dimension of the tensor counts experts."""
    return any(source.experts is not None for source in tensor.sources)


def make_groups(layouts: Sequence[FileLayout], checkpoint: Checkpoint) -> list[Group]:
    """Every tensor of every file in exactly one group; groups in the order of what they read.

    Raises PlanError where a tensor and its sources don't fit together: that would be a fault of the placement.
    """
    found: dict[tuple[int, bytes], tuple[Numbers, list[Target]]] = {}
    for number, layout in enumerate(layouts):
        for index, tensor in enumerate(layout.file.tensors):
            sources = tuple(sorted(tensor.sources, key=lambda source: source.at))
            for problem in _problems(tensor, sources, checkpoint):
                raise PlanError(f"shard tensor {tensor.name} in {layout.file.name}: {problem}")
            numbers = _sequence(sources)
            target = Target(number, index, tensor, sources, len(layout.header) + layout.offsets[index])
            found.setdefault((len(sources), numbers.tobytes()), (numbers, []))[1].append(target)
    groups = [Group(numbers, tuple(targets)) for numbers, targets in found.values()]
    return sorted(groups, key=lambda group: _place(group, checkpoint))


def _place(group: Group, checkpoint: Checkpoint) -> tuple[int, int]:
    """Where the group's first stored tensor lies: file, then offset."""
    if not len(group.numbers):
        return -1, 0
    return int(checkpoint.file_numbers[group.numbers[0]]), int(checkpoint.starts[group.numbers[0]])


def _sequence(sources: Sequence[Source]) -> Numbers:
    if not sources:
        return np.zeros(0, np.int64)
    columns = [np.asarray(source.tensors, np.int64) for source in sources]
    return np.stack(columns, axis=1).ravel()


def _problems(tensor: ShardTensor, sources: Sequence[Source], checkpoint: Checkpoint) -> Iterator[str]:
    """What doesn't fit together, as sentences."""
    stacked = is_stacked(tensor)
    shape, rows = (tensor.shape[1:] if stacked else tensor.shape), 0
    for source in sources:
        many = len(source.experts) if source.experts is not None else 1
        if (source.experts is not None) != stacked or many != (tensor.shape[0] if stacked else 1):
            yield f"{source.pattern} stacks {many} experts, the tensor is {list(tensor.shape)}"
        elif len(source.tensors) != many or len(source.at) != len(shape):
            yield f"{source.pattern} has {len(source.tensors)} tensors at {source.at} for {list(shape)}"
        elif (filled := rows_filled(source, shape)) is None:
            yield f"{source.pattern} covers {source.cuts} at {source.at}: every source must cover whole rows"
        elif shape and not rows <= source.at[0] <= source.at[0] + filled <= shape[0]:
            yield f"{source.pattern} lies at row {source.at[0]}, behind {rows} of {shape[0]}: sources overlap"
        else:
            rows = source.at[0] + filled if shape else 1
            numbers = np.asarray(source.tensors)
            if numbers.min(initial=0) < 0 or numbers.max(initial=0) >= len(checkpoint.shapes):
                yield f"{source.pattern} is number {numbers.max()} of {len(checkpoint.shapes)} stored tensors"
                return
            for kind in {(checkpoint.dtypes[n], checkpoint.shapes[n]) for n in numbers.tolist()}:
                if source.converted is not None:
                    made = next(p for p in source.converted.parts if p.kind == tensor.part)
                    kind = made.dtype, made.shape
                yield from _misfits(source, kind[0], kind[1], tensor.dtype)


def _misfits(source: Source, dtype: str, stored: tuple[int, ...], target: str) -> Iterator[str]:
    if dtype != (source.widened or target) or (source.widened and WIDENED.get(dtype) != target):
        yield f"{source.pattern} is stored as {dtype}, the shard holds {target}"
    if source.arranged is not None:
        if math.prod(source.arranged.view) != math.prod(stored) or any(cut.repeat != 1 for cut in source.cuts):
            yield f"{source.pattern} is stored as {list(stored)}, but read as {list(source.arranged.view)}"
        stored = source.arranged.view
    if len(stored) != len(source.cuts):
        yield f"{source.pattern} is stored as {list(stored)}, but has {len(source.cuts)} cuts"
        return
    for size, cut in zip(stored, source.cuts, strict=True):
        last = 0
        for start, stop in cut.runs:
            if not last <= start <= stop <= size * cut.repeat:
                yield f"{source.pattern} is cut at {start}:{stop}, behind {last}, of {size * cut.repeat}"
            last = stop


def in_bytes(dtype: str, shape: tuple[int, ...], cuts: tuple[Cut, ...]) -> tuple[int, tuple[int, ...], tuple[Cut, ...]]:
    """Item size, shape and cuts in items that are whole bytes: of types below a byte the last dimension is packed.

    A scalar becomes one row. Raises PlanError where a cut falls inside a byte.
    """
    if not shape:
        shape, cuts = (1,), (Cut(((0, 1),)),)
    bits = DTYPE_BITS[dtype]
    if bits >= 8:
        return bits // 8, shape, cuts
    borders = [border * bits for run in cuts[-1].runs for border in run]
    if shape[-1] * bits % 8 or any(border % 8 for border in borders) or cuts[-1].repeat != 1:
        raise PlanError(f"{dtype} {list(shape)} is cut at {cuts[-1].runs}, inside a byte; choose sizes that don't")
    runs = tuple((start * bits // 8, stop * bits // 8) for start, stop in cuts[-1].runs)
    return 1, (*shape[:-1], shape[-1] * bits // 8), (*cuts[:-1], Cut(runs))


def needed(cuts: Sequence[Cut]) -> list[tuple[int, int]]:
    """Half-open ranges of stored indexes that any of the cuts takes, ascending and apart."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted((a // cut.repeat, -(-b // cut.repeat)) for cut in cuts for a, b in cut.runs if a < b):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged
