"""How a model class holds a parameter otherwise than the checkpoint stores it: the words that key maps put round roles.

`turned(R)` rows and columns exchanged; `halves(R)` of each head's rows the even ones, then the odd ones; `flat(R)`
without dimensions of one element; `F32(R)` in that type. All of them keep every number, so that the checkpoint comes
back bit for bit. `first(R)` is held by the first rank alone, and is zero on the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shard_plans.errors import PlanError
from shard_plans.families.model import Model
from shard_plans.placement.arrangement import WIDENED, Arrangement
from shard_plans.placement.cuts import ParameterCut, PartCut
from shard_plans.placement.shards import Cut

FIRST = "first"
"""The word of what only the first rank holds."""


def in_form(word: str, cut: ParameterCut, model: Model) -> ParameterCut:
    """What a rank takes of a parameter, as the word says that it is held. Raises PlanError where it can't be."""
    if word in ("", FIRST):
        return cut
    if len(cut.parts) > 1:
        raise PlanError(
            f"{cut.parts[0].part.pattern} is quantised, and the engine holds it with its numbers in another order; "
            f"convert without --layout, or from a checkpoint that isn't quantised"
        )
    return replace(cut, parts=(FORMS[word](cut.parts[0], model),))


def _turned(cut: PartCut, _: Model) -> PartCut:
    rows, columns = cut.shape
    return replace(cut, shape=(columns, rows), arranged=Arrangement(cut.part.shape, (1, 0)))


def _flat(cut: PartCut, _: Model) -> PartCut:
    kept = [axis for axis, size in enumerate(cut.part.shape) if size != 1]
    view = tuple(cut.part.shape[axis] for axis in kept)
    return replace(
        cut,
        cuts=tuple(cut.cuts[axis] for axis in kept),
        shape=tuple(cut.shape[axis] for axis in kept),
        arranged=Arrangement(view, tuple(range(len(view)))),
    )


def _halves(cut: PartCut, model: Model) -> PartCut:
    """Rotary pairs (0, 1), (2, 3), ... of each head become its two halves."""
    size, (rows, *rest) = model.sizes["head_dim"], cut.part.shape
    if size % 2 or any(border % size for run in cut.cuts[0].runs for border in run):
        raise PlanError(f"{cut.part.pattern} is cut at {cut.cuts[0].runs}, which isn't whole heads of {size} even rows")
    heads = Cut(tuple((start // size, stop // size) for start, stop in cut.cuts[0].runs))
    cuts = (heads, Cut(((0, size // 2),)), Cut(((0, 2),)), *cut.cuts[1:])
    view = (rows // size, size // 2, 2, *rest)
    return replace(cut, cuts=cuts, arranged=Arrangement(view, (0, 2, 1, *range(3, len(view)))))


def _wide(cut: PartCut, _: Model) -> PartCut:
    if cut.part.dtype == "F32":
        return cut
    if WIDENED.get(cut.part.dtype) != "F32":
        raise PlanError(
            f"{cut.part.pattern} is stored as {cut.part.dtype}; the engine holds F32, which it isn't put in"
        )
    return replace(cut, widened="F32")


FORMS: dict[str, Callable[[PartCut, Model], PartCut]] = {
    "turned": _turned, "flat": _flat, "halves": _halves, "F32": _wide,
}  # fmt: skip
"""Word -> what it makes of a part."""
