"""What a shard holds, and where each of its bytes comes from."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shard_plans.checkpoints.dtypes import DTYPE_BITS
from shard_plans.families.parameter import Parameter
from shard_plans.placement.arrangement import Arrangement
from shard_plans.placement.grid import Coordinate


@dataclass(frozen=True, slots=True)
class Cut:
    """What a rank takes of one dimension of a stored tensor."""

    runs: tuple[tuple[int, int], ...]
    """Half-open ranges, ascending, laid one after the other in the target; counted in target elements."""
    repeat: int = 1
    """Target elements that each stored element becomes (a refined scale); stored index = target index // repeat."""

    @property
    def length(self) -> int:
        """Target elements taken."""
        return sum(stop - start for start, stop in self.runs)


@dataclass(frozen=True, slots=True)
class Source:
    """A region of a shard tensor, copied from one stored tensor, or from one stored tensor an expert."""

    pattern: str
    """Stored name; `{expert}` stands for the expert number where each has a tensor of its own."""
    experts: tuple[int, ...] | None
    """Expert ids in the order in which they are stacked along the target's first dimension; None: not an expert."""
    cuts: tuple[Cut, ...]
    """One for each dimension of the stored tensor, or of the shape that `arranged` reads it as; of what an expert has
    of it, where it stacks them."""
    at: tuple[int, ...]
    """Where the region starts in the target, without the stacked dimension."""
    tensors: np.ndarray[Any, np.dtype[np.int64]] = field(compare=False, repr=False)
    """Rows of the checkpoint: one tensor, or one an expert (a tensor, or a slice of one that stacks the experts)."""
    converted: Parameter | None = field(default=None, compare=False, repr=False)
    """The parameter that this is a part of, where it is stored in another precision than the checkpoint's. The pattern
    and cuts are then those of the converted checkpoint; `tensors` are the values that are converted."""
    arranged: Arrangement | None = None
    """How its numbers lie in the target, where that isn't as stored; the region is whole rows all the same."""
    widened: str | None = None
    """The stored type, where the target has the wider one of `WIDENED`: the same numbers, zero bits behind each."""

    @property
    def drawn(self) -> tuple[tuple[str, Source], ...]:
        """What is read for it: itself, or where precision changes all parts of the parameter as stored, whole."""
        if self.converted is None or self.converted.source is None:
            return ((self.pattern, self),)
        return tuple(
            (
                part.pattern,
                Source(part.pattern, self.experts, tuple(Cut(((0, size),)) for size in part.shape), (), part.tensors),
            )
            for part in self.converted.source.parts
        )


@dataclass(frozen=True, slots=True)
class ShardTensor:
    """One tensor of a shard file. Elements that no source covers are padding: zero (of a vocabulary), or `fill`."""

    name: str
    """Native name: `embed`, `layers.3.attn.qkv`, `layers.3.experts.gate_up.scale`, `vision.5.qkv`, `head`."""
    dtype: str
    """safetensors' word: BF16, F8_E4M3, F32, ..."""
    shape: tuple[int, ...]
    sources: tuple[Source, ...]
    format: str | None = None
    """Quantised storage format (`fp8_block`); None where the values are plain."""
    part: str = "values"
    """Which part of the parameter this is: values, scale or global_scale."""
    block: tuple[int, int] | None = None
    """Rows and columns of values that share one scale, after refinement; the same on values and scale."""
    fill: float | None = None
    """What a tensor without sources holds in every element: a constant that a loader wants; None: zero."""

    @property
    def nbytes(self) -> int:
        """Payload bytes."""
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8

    @property
    def layer(self) -> int | None:
        """Layer number, None for tensors outside the layers."""
        head, _, rest = self.name.partition(".")
        return int(rest.split(".", 1)[0]) if head == "layers" else None


@dataclass(frozen=True, slots=True)
class ShardFile:
    """One file of the output: shared by every rank whose coordinates agree with `place`."""

    name: str
    place: dict[str, int]
    """The coordinates that the file stands for: stage and tp, or stage, ep, etp and, where replicas differ, edp."""
    tensors: tuple[ShardTensor, ...]
    """In file order: sizes that are multiples of 4096 first, in execution order, then the small ones."""

    @property
    def nbytes(self) -> int:
        """Payload bytes, the header not counted."""
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class Skipped:
    """Stored tensors that no rank holds, and why."""

    pattern: str
    count: int
    nbytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Constant:
    """A region of a stored tensor whose content is known and that no rank holds: conversion checks it, restore writes
    it.
    """

    pattern: str
    """Stored name."""
    region: tuple[tuple[int, int], ...]
    """Half-open range of each dimension of the stored tensor, in stored elements."""
    tensors: np.ndarray[Any, np.dtype[np.int64]] = field(compare=False, repr=False)
    """Numbers of the stored tensors in the checkpoint."""
    reason: str
    values: tuple[int, ...] | None = None
    """The elements, whole numbers in row-major order; None: all zero."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A whole plan laid out: every file, which rank reads which, what is left out."""

    files: tuple[ShardFile, ...]
    ranks: tuple[tuple[Coordinate, tuple[str, ...]], ...]
    """Each rank's coordinate and the names of its files."""
    skipped: tuple[Skipped, ...]
    constants: tuple[Constant, ...] = ()
