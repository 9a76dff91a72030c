"""Units of work where precision changes: experts, or rows of one stored matrix, whatever they become for each rank.

Their borders follow from the stored matrices alone, so that the errors add up in one order under every plan. Stretches
therefore begin and end anywhere: a chunk that no stretch holds whole is hashed when everything is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from converter.forward.grouping import Group, Target
from converter.forward.units import Slice
from converter.precision.errors import SIZE
from converter.precision.matrix import Matrix
from shard_plans.placement.shards import Cut, Source

UNIT = 16 << 20
"""Numbers of a unit, about, unless one expert has more."""


@dataclass(frozen=True, slots=True)
class RecodeUnit:
    """What is converted in one go."""

    group: Group
    experts: tuple[int, int] | None
    """Which of the stacked experts, where experts are stacked."""
    member: int | None
    """Which of the stored tensors that follow one another in the targets; None: all of them."""
    rows: tuple[int, int] | None
    """Which rows of that one, in the target's order."""
    slices: tuple[Slice, ...]

    @property
    def nbytes(self) -> int:
        """Bytes written."""
        return sum(part.stop - part.start for part in self.slices)

    @property
    def matrices(self) -> list[tuple[int, int, Matrix | None]]:
        """The stored tensors in order: place in the stack, member, and the matrix; None for one that is only copied."""
        sources = self.group.targets[0].sources
        members = range(len(sources)) if self.member is None else (self.member,)
        turns = range(*self.experts) if self.experts is not None else range(1)
        return [(turn, member, _matrix(sources[member], turn)) for turn in turns for member in members]

    @property
    def extra(self) -> int:
        """Bytes of errors that its entry in the journal ends with."""
        return SIZE * sum(matrix is not None for _, _, matrix in self.matrices)


def _matrix(source: Source, turn: int) -> Matrix | None:
    if source.converted is None:
        return None
    return Matrix(source.converted, 0 if source.experts is None else source.experts[turn])


def make_recode_units(groups: Sequence[Group]) -> list[RecodeUnit]:
    """All units, in the order of what they read."""
    return [unit for group in groups for unit in _units(group)]


def _units(group: Group) -> Iterator[RecodeUnit]:
    first = group.targets[0]
    matrices = [_matrix(source, 0) for source in first.sources]
    sizes = [0 if matrix is None else matrix.shape[0] * matrix.shape[1] for matrix in matrices]
    whole = sum(sizes)
    if first.stacked is not None:
        step = max(1, UNIT // max(1, whole))
        for begin, end in pairwise([*range(0, first.stacked, step), first.stacked]):
            slices = []
            for target in group.targets:
                each = target.tensor.nbytes // first.stacked
                slices.append(Slice(target, begin * each, end * each))
            yield RecodeUnit(group, (begin, end), None, None, tuple(slices))
        return
    if whole <= UNIT or None in matrices:
        slices = [Slice(target, 0, target.tensor.nbytes) for target in group.targets]
        yield RecodeUnit(group, None, None, None, tuple(slices))
        return
    for member, matrix in enumerate(matrices):
        if matrix is None:
            continue
        rows, columns = matrix.shape
        step = matrix.step() * max(1, UNIT // (matrix.step() * columns))
        borders = [*range(0, rows, rows if matrix.turned else step), rows]
        for span in pairwise(borders):
            parts = [_slice(target, member, span, matrix) for target in group.targets]
            yield RecodeUnit(group, None, member, span, tuple(part for part in parts if part.start < part.stop))


def _slice(target: Target, member: int, rows: tuple[int, int], matrix: Matrix) -> Slice:
    """What these rows of a member become in the target; padding comes with the last row."""
    source, kind = target.sources[member], target.tensor.part
    tall = matrix.parameter.block[0] if matrix.parameter.block is not None else 1
    begin = source.at[0] * target.row_bytes
    ends = []
    for border in rows:
        if kind == "global_scale":
            border = min(border, 1)
        elif kind == "scale":
            border = -(-border // tall)
        ends.append(begin + taken(source.cuts[0], border) * target.row_bytes)
    last = member == len(target.sources) - 1 and rows[1] == matrix.shape[0]
    return Slice(target, ends[0], target.tensor.nbytes if last else ends[1])


def taken(cut: Cut, border: int) -> int:
    """How many target rows come of the stored rows before a border."""
    border *= cut.repeat
    return sum(min(max(border, start), stop) - start for start, stop in cut.runs)
