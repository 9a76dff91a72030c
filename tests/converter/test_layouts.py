"""Parts of stored tensors, put together again in any pieces: what was cut is what comes back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from converter.sources.held import HeldTensor, Tile
from converter.sources.holdings import Holdings
from converter.sources.layouts import Layout, in_items, make_layout, read_as, rectangles, stored_region, uncovered
from converter.sources.proof import ProvingReader
from converter.sources.sharded import ShardReader
from shard_plans.checkpoints.checkpoint import Checkpoint, SourceFile
from shard_plans.errors import ManifestError
from shard_plans.placement.shards import Cut
from tests.tools.cases import a_cut, taken

TYPES = {"U8": "u1", "BF16": "<u2", "F32": "<u4"}


class Bytes:
    """Shard tensors in memory, in the place of files."""

    def __init__(self, data: dict[str, bytes], piece: int) -> None:
        self.data, self.room, self.piece = data, 1 << 20, piece

    def take(self, tensor: HeldTensor, start: int, length: int) -> memoryview:  # noqa: D102
        assert 0 <= start <= start + length <= tensor.nbytes
        assert length <= self.room
        return memoryview(bytearray(self.data[tensor.name][start : start + length]))


class Held:
    """The parts of one stored tensor."""

    def __init__(self, shape: tuple[int, ...], tiles: list[Tile]) -> None:
        self.whole, self.parts = shape, tiles

    def entries(self, _: int) -> int:  # noqa: D102
        return 1

    def shape(self, _: int) -> tuple[int, ...]:  # noqa: D102
        return self.whole

    def tiles(self, _: int, __: int) -> list[Tile]:  # noqa: D102
        return self.parts

    def unheld(self, _: int, layouts: Sequence[Layout]) -> tuple[int, ...] | None:  # noqa: D102
        whole = tuple(((0, size),) for size in layouts[0].stored) if layouts else (((0, 1),),)
        return uncovered(whole, [layout.region for layout in layouts]) if layouts else (0,)

    def constants(self, _: int) -> list[Any]:  # noqa: D102
        return []


@st.composite
def borders(draw: st.DrawFn, size: int, repeat: int) -> list[Cut]:
    """A dimension dealt to some holders, each with one run or several: together they have all of it."""
    inner = draw(st.lists(st.integers(0, size * repeat), max_size=5))
    edges = [0, *sorted(inner), size * repeat]
    runs = [(a, b) for a, b in pairwise(edges) if a < b]
    count = draw(st.integers(1, 3))
    owners = [draw(st.integers(0, count - 1)) for _ in runs]
    cuts = [
        Cut(tuple(run for run, owner in zip(runs, owners, strict=True) if owner == n), repeat) for n in range(count)
    ]
    return [cut for cut in cuts if cut.runs]


@settings(max_examples=300)
@given(st.data())
def test_what_was_cut_comes_back(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(list(TYPES)))
    shape = tuple(data.draw(st.lists(st.integers(1, 6), max_size=3)))
    stored = np.random.default_rng(1).integers(0, 200, shape).astype(TYPES[dtype])
    dealt = [data.draw(borders(size, data.draw(st.sampled_from([1, 1, 2, 3])))) for size in shape]
    tiles, made = [], {}
    for number, cuts in enumerate(product(*dealt)):
        raw, lead = taken(stored, cuts).tobytes(), data.draw(st.integers(0, 2)) * 8
        made[str(number)] = bytes(lead) + raw
        held = HeldTensor("file", str(number), 0, lead + len(raw), b"", 0)
        tiles.append((held, make_layout(dtype, shape, cuts), lead))
    size = stored.nbytes
    checkpoint = Checkpoint(
        Path("nowhere"), {}, "", (SourceFile("file", size, 0, "", {}),), ["t"], [dtype], [shape], np.zeros(1, np.int32),
        np.full(1, 100, np.int64), np.full(1, size, np.int64), {"t": 0}, size, "", (),
    )  # fmt: skip
    shards = cast(ProvingReader, Bytes(made, data.draw(st.sampled_from([8, 24, 1000]))))
    reader = ShardReader(checkpoint, cast(Holdings, Held(shape, tiles)), shards)
    item = stored.itemsize
    for _ in range(4):
        first = data.draw(st.integers(0, size // item - 1))
        stop = data.draw(st.integers(first + 1, size // item))
        found = reader.fetch("file", 100 + first * item, (stop - first) * item)
        assert bytes(found) == stored.tobytes()[first * item : stop * item]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_rectangles_follow_one_another(shape: list[int], data: st.DataObject) -> None:
    whole = np.arange(math.prod(shape)).reshape(shape)
    first = data.draw(st.integers(0, whole.size))
    stop = data.draw(st.integers(first, whole.size))
    found = [whole[tuple(slice(a, b) for a, b in spans)].ravel() for spans in rectangles(shape, first, stop)]
    assert [int(i) for part in found for i in part] == list(range(first, stop))


@given(st.data())
def test_the_first_index_that_nobody_holds(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))

    def region() -> tuple[tuple[tuple[int, int], ...], ...]:
        return stored_region([data.draw(a_cut(size, data.draw(st.sampled_from([1, 2])))) for size in shape])

    def cells(one: tuple[tuple[tuple[int, int], ...], ...]) -> np.ndarray:
        made = np.zeros(shape, np.bool_)
        made[np.ix_(*([i for a, b in spans for i in range(a, b)] for spans in one))] = True
        return made

    wanted, held = region(), [region() for _ in range(data.draw(st.integers(0, 3)))]
    left = cells(wanted)
    for one in held:
        left &= ~cells(one)
    expected = tuple(int(i) for i in np.argwhere(left)[0]) if left.any() else None
    assert uncovered(wanted, held) == expected


def test_too_many_pieces_are_refused() -> None:
    rows = tuple((2 * n, 2 * n + 1) for n in range(10_000))
    with pytest.raises(ManifestError, match="cut at 19999 x 19999 places"):
        uncovered((rows, rows), [])


def test_types_below_a_byte_are_counted_in_bytes() -> None:
    assert in_items("F4", (3, 8)) == (1, (3, 4))
    assert read_as("F4", (3, 8), []) == (3, 4)
    layout = make_layout("F4", (3, 8), (Cut(((0, 3),)), Cut(((4, 8),))))
    assert (layout.item, layout.shape, layout.region) == (1, (3, 2), (((0, 3),), ((2, 4),)))
