"""Cutting one parameter for one member of each axis: its values and its scales by one rule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from shard_plans.errors import PlanError
from shard_plans.families.dims import Dim, Share, Taken, extent, take
from shard_plans.families.model import Model
from shard_plans.families.parameter import Parameter, Part, logical_shape
from shard_plans.placement.arrangement import Arrangement
from shard_plans.placement.shards import Cut

VOCABULARY = ("embed", "head")
"""Last words of the roles whose rows may be padded."""


@dataclass(frozen=True, slots=True)
class PartCut:
    """What a rank takes of one stored part (of each expert's, where there are experts)."""

    part: Part
    cuts: tuple[Cut, ...]
    """One a dimension of the stored tensor."""
    shape: tuple[int, ...]
    """Extent in the target; where a size is padded more than the cuts hold, and the rest is zero."""
    arranged: Arrangement | None = None
    """How its numbers are ordered there, where not as stored; the cuts are then of the shape that it is read as."""
    widened: str | None = None
    """Its type there, where that is a wider one than the stored."""

    @property
    def dtype(self) -> str:
        """Its type in the target."""
        return self.widened or self.part.dtype


@dataclass(frozen=True, slots=True)
class ParameterCut:
    """What a rank takes of a parameter."""

    parts: tuple[PartCut, ...]
    block: tuple[int, int] | None
    """Rows and columns that share a scale in the target: the stored block, or a refinement of it."""


class Cutter:
    """Cuts parameters of one model under one plan's axis sizes; the same shape is worked out once."""

    def __init__(
        self,
        model: Model,
        uneven: Mapping[str, str],
        strict_blocks: bool = False,
        blocks: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        """`strict_blocks` refuses cuts inside a quantisation block instead of refining the scales.

        `blocks`: group -> the block that its scales are refined to, whatever is cut.
        """
        self.model = model
        self.uneven = uneven
        self.strict_blocks = strict_blocks
        self.blocks = blocks or {}
        self._known: dict[object, tuple[tuple[tuple[Cut, ...], tuple[int, ...]], ...]] = {}
        self._blocks: dict[object, tuple[int, int] | None] = {}

    def cut(self, parameter: Parameter, shares: Mapping[str, Share]) -> ParameterCut:
        """The cut for one member of each axis.

        Raises GridError where a size doesn't divide; PlanError where a block is cut and `strict_blocks` is set, or
        where something quantised would have to be padded.
        """
        dims = tuple(dim.text for dim in parameter.dims)
        axes = {axis for dim in parameter.dims for axis, _ in dim.marks}
        block = self.blocks.get(parameter.group)
        key = (
            dims,
            parameter.format,
            block,
            len(parameter.parts),
            *((a, shares[a]) for a in sorted(axes) if a in shares),
        )
        if key not in self._known:
            self._blocks[key] = block = self._refined_block(parameter, shares)
            taken = [take(dim, self.model.sizes, self.uneven, shares) for dim in parameter.dims]
            if parameter.format is not None or parameter.role.rpartition(".")[2] not in VOCABULARY:
                _refuse_padding(parameter, taken)
            self._known[key] = tuple(_part(part.kind, taken, parameter, block or (1, 1)) for part in parameter.parts)
        parts = zip(parameter.parts, self._known[key], strict=True)
        return ParameterCut(tuple(PartCut(part, cuts, shape) for part, (cuts, shape) in parts), self._blocks[key])

    def _refined_block(self, parameter: Parameter, shares: Mapping[str, Share]) -> tuple[int, int] | None:
        """The greatest common divisor of the block and every border that some member of the axis cuts at."""
        if parameter.block is None:
            return None
        refined = []
        for dim, block in zip(parameter.dims[-2:], parameter.block, strict=True):
            stored = extent(dim, self.model.sizes)
            borders = {border for axis, _ in dim.marks if axis in shares for border in self._borders(dim, axis, shares)}
            refined.append(math.gcd(block, *(border for border in borders if border != stored)))
        wanted = self.blocks.get(parameter.group)
        if wanted is not None and all(size % finer == 0 for size, finer in zip(refined, wanted, strict=True)):
            return wanted
        rows = parameter.block == (1, logical_shape(parameter)[-1])  # a row's scale is no block to be cut inside of
        if self.strict_blocks and tuple(refined) != parameter.block and not rows:
            raise PlanError(
                f"{parameter.parts[0].pattern}: this plan cuts inside a quantisation block of "
                f"{parameter.block[0]} x {parameter.block[1]} (the cuts allow {refined[0]} x {refined[1]}); "
                f"leave out --strict-blocks to refine the scales without loss, or choose smaller tp or etp"
            )
        return refined[0], refined[1]

    def _borders(self, dim: Dim, axis: str, shares: Mapping[str, Share]) -> set[int]:
        count = shares[axis].count
        members = [{**shares, axis: Share(index, count)} for index in range(count)]
        taken = [take(dim, self.model.sizes, self.uneven, member) for member in members]
        return {border for t in taken for run in t.runs for border in run}


def _part(
    kind: str, taken: list[Taken], parameter: Parameter, block: tuple[int, int]
) -> tuple[tuple[Cut, ...], tuple[int, ...]]:
    if kind == "global_scale":
        return (Cut(((0, 1),)),), (1,)
    return _values(taken, parameter) if kind == "values" else _scale(taken, parameter.block or (1, 1), block)


def _refuse_padding(parameter: Parameter, taken: list[Taken]) -> None:
    """Rows of padding would need scales that nobody stored; and only those of a vocabulary mean nothing."""
    what = "quantised" if parameter.format is not None else f"no vocabulary but {parameter.role}"
    for dim, t in zip(parameter.dims, taken, strict=True):
        held = sum(stop - start for start, stop in t.runs)
        if held != t.length:
            raise PlanError(
                f"{parameter.parts[0].pattern} is {what}, so its dimension {dim.text} can't be padded: a rank would "
                f"hold {t.length}, of which {held} are stored; choose parallel sizes that divide it"
            )


def _values(taken: list[Taken], parameter: Parameter) -> tuple[tuple[Cut, ...], tuple[int, ...]]:
    """The values taken, in stored elements: a packed element, or a block that is stored together, must not be cut."""
    fold = parameter.format.fold if parameter.format is not None else 1
    step = parameter.format.pack * fold if parameter.format is not None else 1
    last = taken[-1]
    inside = next((border for run in last.runs for border in run if border % step), None)
    if inside is not None:
        raise PlanError(
            f"{parameter.parts[0].pattern}: this plan cuts its columns at {inside}, inside {step} values that are "
            f"stored together; choose a smaller tp or etp"
        )
    inner = (fold,) if fold > 1 else ()
    cuts = (*(Cut(t.runs) for t in taken[:-1]), Cut(tuple((start // step, stop // step) for start, stop in last.runs)))
    return (*cuts, *(Cut(((0, size),)) for size in inner)), (
        *(t.length for t in taken[:-1]), last.length // step, *inner,
    )  # fmt: skip


def _scale(
    taken: list[Taken], stored: tuple[int, int], refined: tuple[int, int]
) -> tuple[tuple[Cut, ...], tuple[int, ...]]:
    """The scales of the values taken: runs in units of the refined grid, which repeats each stored scale."""
    cuts = [Cut(t.runs) for t in taken[:-2]]
    for t, block, fine in zip(taken[-2:], stored, refined, strict=True):
        runs = [(start // fine, -(-stop // fine)) for start, stop in t.runs]
        if any(a[1] > b[0] for a, b in pairwise(runs)):
            raise PlanError(f"scale blocks of {fine} values overlap between runs {t.runs}")
        cuts.append(Cut(tuple(runs), block // fine))
    return tuple(cuts), tuple(cut.length for cut in cuts)
