"""Regions of stored tensors whose content an output declares, by the name of the tensor."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from converter.backward.gather import NUMBER, Array, Span
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
        self._by_pattern: dict[str, list[ConstantRegion]] = {}
        for constant in constants:
            self._by_pattern.setdefault(constant.pattern, []).append(constant)

    def of(self, name: str) -> list[ConstantRegion]:
        """The regions of the stored tensor `name` whose content is declared."""
        found = list(self._by_pattern.get(name, ()))
        for match in NUMBER.finditer(name) if self._by_pattern else ():
            found += self._by_pattern.get(f"{name[: match.start()]}{{expert}}{name[match.end() :]}", ())
        return found


@dataclass(frozen=True, slots=True)
class Declared:
    """A declared region of one stored tensor, counted as `gather.items` counts shapes."""

    region: Region
    values: Array | None
    """What it holds, in the region's shape, as items of whole bytes; None: zeros."""

    def within(self, block: Sequence[Span]) -> tuple[tuple[slice, ...], Array | int] | None:
        """The part of a block that lies in the region, relative to the block, and what it must hold; None: no part."""
        spans = [(max(a, low), min(b, high)) for (a, b), (low, high) in zip(self.region, block, strict=True)]
        if not spans or any(a >= b for a, b in spans):
            return None
        here = tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(spans, block, strict=True))
        if self.values is None:
            return here, 0
        there = tuple(slice(a - first, b - first) for (a, b), (first, _) in zip(spans, self.region, strict=True))
        return here, self.values[there]


def declared(constant: ConstantRegion, dtype: str, shape: Sequence[int]) -> Declared | None:
    """The constant in a stored tensor of this type and shape; None where it doesn't lie in it, or can't be in it."""
    region, bits = constant.region, DTYPE_BITS[dtype]
    if len(region) != len(shape) or any(not 0 <= a <= b <= size for (a, b), size in zip(region, shape, strict=True)):
        return None
    if constant.values is not None:
        lengths = [stop - start for start, stop in region]
        if dtype not in ("I32", "I64") or len(constant.values) != math.prod(lengths):
            return None
        if not all(0 <= value < 1 << (bits - 1) for value in constant.values):
            return None
        return Declared(region, np.array(constant.values, f"<u{bits // 8}").reshape(lengths))
    if not region:
        return Declared(((0, 1),), None)
    if bits < 8:
        start, stop = region[-1]
        region = (*region[:-1], (-(-start * bits // 8), stop * bits // 8))
    return Declared(region, None)
