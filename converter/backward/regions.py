"""Regions of stored tensors that an output declares to be zero, by the name of the tensor."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from converter.backward.gather import Span
from shard_plans.checkpoints.dtypes import DTYPE_BITS
from shard_plans.documents.manifest import ConstantRegion

Region = tuple[Span, ...]
HOLE = re.compile(r"\\\{[a-z_]+\\\}")


def form(pattern: str) -> re.Pattern[str]:
    """What a stored name must look like to be meant by the pattern."""
    return re.compile(HOLE.sub("[0-9]+", re.escape(pattern)))


class Regions:
    """The declared constants of an output."""

    def __init__(self, constants: Iterable[ConstantRegion]) -> None:
        self._plain: dict[str, list[Region]] = {}
        self._forms: list[tuple[re.Pattern[str], Region]] = []
        for constant in constants:
            if "{" in constant.pattern:
                self._forms.append((form(constant.pattern), constant.region))
            else:
                self._plain.setdefault(constant.pattern, []).append(constant.region)

    def of(self, name: str) -> list[Region]:
        """The regions of the stored tensor `name` that are declared to be zero."""
        return [*self._plain.get(name, ()), *(region for form, region in self._forms if form.fullmatch(name))]


def in_items(region: Region, dtype: str, shape: Sequence[int]) -> Region | None:
    """The region counted as `gather.items` counts shapes; None where it doesn't lie in the tensor."""
    bits = DTYPE_BITS[dtype]
    if len(region) != len(shape) or any(not 0 <= a <= b <= size for (a, b), size in zip(region, shape, strict=True)):
        return None
    if not region:
        return ((0, 1),)
    if bits >= 8:
        return region
    start, stop = region[-1]
    return (*region[:-1], (-(-start * bits // 8), stop * bits // 8))


def shared(region: Region, block: Sequence[Span]) -> tuple[slice, ...] | None:
    """The part of a block that lies in the region, relative to the block; None where there is none."""
    spans = [(max(a, low), min(b, high)) for (a, b), (low, high) in zip(region, block, strict=True)]
    if any(a >= b for a, b in spans):
        return None
    return tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(spans, block, strict=True))
