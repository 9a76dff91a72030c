"""The part of a placement that some ranks need: their files, and what those files draw on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from shard_plans.errors import PlanError
from shard_plans.placement.experts import format_ids, parse_ids
from shard_plans.placement.shards import Constant, Placement


def parse_ranks(text: str) -> tuple[int, ...]:
    """`8-15,20` -> the ranks, ascending and once each. Raises PlanError."""
    try:
        return tuple(sorted(set(parse_ids(text))))
    except PlanError:
        raise PlanError(f"--ranks {text!r} isn't a list such as 8-15 or 0,4,6-7") from None


def select(placement: Placement, ranks: Sequence[int] | None) -> Placement:
    """The files of these ranks alone, and the constants in what they read. Raises PlanError for a rank there isn't."""
    if ranks is None:
        return placement
    world = len(placement.ranks)
    if not ranks or not 0 <= min(ranks) <= max(ranks) < world:
        asked = format_ids(ranks) or "none"
        raise PlanError(f"ranks {asked} are asked for, the plan has 0 to {world - 1}; name ranks of the plan")
    wanted = set(ranks)
    kept = tuple((at, names) for at, names in placement.ranks if at.rank in wanted)
    names = {name for _, files in kept for name in files}
    files = tuple(file for file in placement.files if file.name in names)
    read = {number for file in files for t in file.tensors for s in t.sources for number in s.tensors.tolist()}
    constants = [found for item in placement.constants if (found := _within(item, read)) is not None]
    return replace(placement, files=files, ranks=kept, constants=tuple(constants))


def _within(constant: Constant, read: set[int]) -> Constant | None:
    """The constant, as far as it lies in tensors that are read; None where it doesn't."""
    numbers = [number for number in constant.tensors.tolist() if number in read]
    return replace(constant, tensors=np.array(numbers, np.int64)) if numbers else None
