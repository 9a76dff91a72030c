"""Random stored tensors and cuts of them, small enough to be compared with plain indexing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from converter.streams.sink import Sink
from shard_plans.checkpoints.checkpoint import Checkpoint
from shard_plans.placement.shards import Cut, ShardTensor, Source

Array = np.ndarray[Any, np.dtype[Any]]


class Collect(Sink):
    """Keeps what arrives, in the order in which it arrives."""

    def __init__(self) -> None:
        self.data = bytearray()

    @property
    def seen(self) -> int:  # noqa: D102
        return len(self.data)

    def take(self, piece: Array) -> None:  # noqa: D102
        self.data += piece.tobytes()

    def zeros(self, count: int) -> None:  # noqa: D102
        assert count >= 0
        self.data += bytes(count)


@dataclass(frozen=True)
class Case:
    """Stored tensors of one shape, and shard tensors that are made of all of them."""

    shape: tuple[int, ...]
    stacked: bool
    experts: int
    members: int
    cuts: Sequence[Sequence[tuple[Cut, ...]]]
    """Of each shard tensor, of each member."""
    padding: int
    buffer: int
    chunk: int = 4 << 20
    unit: int = 64 << 20


def a_cut(size: int, repeat: int) -> st.SearchStrategy[Cut]:
    borders = st.lists(st.integers(0, size * repeat), max_size=4).map(lambda b: sorted(b)[: len(b) // 2 * 2])
    return borders.map(lambda b: Cut(tuple(zip(b[::2], b[1::2], strict=True)), repeat))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    members = draw(st.integers(1, 3))
    cuts = []
    for _ in range(draw(st.integers(1, 3))):
        repeats = [draw(st.sampled_from([1, 1, 2, 3])) for _ in shape]
        rest = [draw(a_cut(size, repeat)) for size, repeat in zip(shape[1:], repeats[1:], strict=True)]
        cuts.append([(draw(a_cut(shape[0], repeats[0])), *rest) for _ in range(members)])
    stacked = draw(st.booleans())
    experts = draw(st.integers(1, 3)) if stacked else 1
    return Case(
        shape, stacked, experts, members, cuts, draw(st.integers(0, 2)), draw(st.sampled_from([2, 8, 64, 4096])),
        draw(st.sampled_from([2, 8, 4096])), draw(st.sampled_from([1, 16, 4096])),
    )  # fmt: skip


def taken(stored: Array, cuts: tuple[Cut, ...]) -> Array:
    """What cuts mean, said in the plainest way."""
    for axis, cut in enumerate(cuts):
        indexes = [place // cut.repeat for start, stop in cut.runs for place in range(start, stop)]
        stored = np.take(stored, np.array(indexes, np.int64), axis)
    return stored


def store(case: Case) -> tuple[Checkpoint, bytes]:
    """A checkpoint of the case's stored tensors, members of one expert after the other, and its only file."""
    count = case.members * case.experts
    size = math.prod(case.shape) * 2
    data = np.random.default_rng(0).bytes(size * count)
    names = [f"e.{n // case.members}.m{n % case.members}" for n in range(count)]
    starts = np.arange(count, dtype=np.int64) * size
    checkpoint = Checkpoint(
        Path("nowhere"), {}, "", (), names, ["BF16"] * count, [case.shape] * count, np.zeros(count, np.int32), starts,
        np.full(count, size, np.int64), {name: n for n, name in enumerate(names)}, size * count, "0" * 32, (),
    )  # fmt: skip
    return checkpoint, data


def shard_tensors(case: Case) -> list[ShardTensor]:
    tensors = []
    for number, members in enumerate(case.cuts):
        sources, row = [], 0
        for member, cuts in enumerate(members):
            ids = np.arange(case.experts, dtype=np.int64) * case.members + member
            pattern = f"e.{{expert}}.m{member}" if case.stacked else f"e.0.m{member}"
            at = (row, *(0 for _ in cuts[1:]))
            sources.append(Source(pattern, tuple(range(case.experts)) if case.stacked else None, cuts, at, ids))
            row += cuts[0].length + case.padding
        shape = (row, *(cut.length for cut in members[0][1:]))
        tensors.append(
            ShardTensor(f"t{number}", "BF16", (case.experts, *shape) if case.stacked else shape, tuple(sources))
        )
    return tensors
