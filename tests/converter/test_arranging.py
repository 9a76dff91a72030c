"""Numbers whose order or type changes on the way into a shard: against numpy's own reshape and transpose, both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from converter.forward.arranging import arrange
from converter.sources.held import HeldTensor
from converter.sources.holdings import Holdings
from converter.sources.layouts import make_layout
from converter.sources.proof import ProvingReader
from converter.sources.sharded import ShardReader
from shard_plans.checkpoints.checkpoint import Checkpoint, SourceFile
from shard_plans.errors import ManifestError
from shard_plans.placement.arrangement import Arrangement, narrow, rows_filled, widen
from shard_plans.placement.shards import Cut
from tests.converter.test_layouts import Bytes, Held
from tests.tools.cases import taken

Cuts = tuple[Cut, ...]


@st.composite
def dealt(draw: st.DrawFn) -> tuple[Arrangement, list[Cuts]]:
    """A shape, an order of its dimensions, and the cuts of two ranks that share one dimension."""
    view = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    arranged = Arrangement(view, tuple(draw(st.permutations(range(len(view))))))
    axis, whole = draw(st.integers(0, len(view) - 1)), [Cut(((0, size),)) for size in view]
    borders = sorted(draw(st.lists(st.integers(0, view[axis]), min_size=2, max_size=2)))
    outer = Cut(tuple(run for run in ((0, borders[0]), (borders[1], view[axis])) if run[0] < run[1]))
    inner = Cut(((borders[0], borders[1]),))
    return arranged, [tuple(cut if a == axis else w for a, w in enumerate(whole)) for cut in (outer, inner)]


@settings(max_examples=200, deadline=None)
@given(dealt(), st.integers(2, 200))
def test_every_rank_gets_its_numbers_in_the_order_asked_for(case: tuple[Arrangement, list[Cuts]], room: int) -> None:
    arranged, cuts = case
    stored = np.random.default_rng(0).integers(0, 1 << 16, arranged.view).astype("<u2")
    data, most = b"lead" + stored.tobytes(), 0

    def read(offset: int, view: memoryview) -> None:
        nonlocal most
        most = max(most, len(view))
        view[:] = data[offset : offset + len(view)]

    got: list[list[np.ndarray[Any, Any]]] = [[], []]
    takers = [(lambda piece, to=to: to.append(piece.copy()), cut) for to, cut in zip(got, cuts, strict=True)]
    arrange(read, 4, 2, arranged, takers, room)
    for found, cut in zip(got, cuts, strict=True):
        wanted = taken(stored, cut).transpose(arranged.axes).ravel()
        assert np.array_equal(np.concatenate([np.zeros(0, "<u2"), *found]), wanted)
    assert most <= max(room, 2 * stored.size // arranged.view[arranged.axes[0]])


@settings(max_examples=200, deadline=None)
@given(dealt(), st.booleans(), st.data())
def test_what_was_ordered_anew_comes_back(
    case: tuple[Arrangement, list[Cuts]], wide: bool, data: st.DataObject
) -> None:
    arranged, cuts = case
    stored = np.random.default_rng(1).integers(0, 1 << 16, arranged.view).astype("<u2")
    shape = (stored.size,)
    tiles, made = [], {}
    for number, cut in enumerate(cuts):
        raw = widen(taken(stored, cut).transpose(arranged.axes), 4 if wide else 2).tobytes()
        made[str(number)] = bytes(8) + raw
        held = HeldTensor("file", str(number), 0, 8 + len(raw), b"", 0)
        tiles.append((held, make_layout("BF16", shape, cut, arranged, "F32" if wide else "BF16"), 8))
    checkpoint = Checkpoint(
        Path("nowhere"), {}, "", (SourceFile("file", stored.nbytes, 0, "", {}),), ["t"], ["BF16"], [shape],
        np.zeros(1, np.int32), np.full(1, 100, np.int64), np.full(1, stored.nbytes, np.int64), {"t": 0}, stored.nbytes,
        "", (),
    )  # fmt: skip
    shards = cast(ProvingReader, Bytes(made, data.draw(st.sampled_from([8, 24, 1000]))))
    reader = ShardReader(checkpoint, cast(Holdings, Held(shape, tiles)), shards)
    first = data.draw(st.integers(0, stored.size - 1))
    stop = data.draw(st.integers(first + 1, stored.size))
    assert bytes(reader.fetch("file", 100 + first * 2, (stop - first) * 2)) == stored.tobytes()[first * 2 : stop * 2]


def test_wider_numbers_are_the_same() -> None:
    halves = np.array([0x3F80, 0xC2F7, 0x7F80, 0x0001], "<u2")
    wide = widen(halves, 4)
    assert wide.view("<f4").tolist()[:3] == [1.0, -123.5, float("inf")]
    assert np.array_equal(narrow(wide, 2), halves)


def test_only_whole_rows_are_filled() -> None:
    arranged, cuts = Arrangement((4, 6), (1, 0)), (Cut(((0, 4),)), Cut(((0, 3),)))
    assert rows_filled(Piece(cuts, (2, 0), arranged), (9, 4)) == 3
    assert rows_filled(Piece(cuts, (2, 0), arranged), (9, 5)) is None
    assert rows_filled(Piece(cuts, (2, 1), arranged), (9, 4)) is None


class Piece:
    """What a region has."""

    def __init__(self, cuts: Cuts, at: tuple[int, ...], arranged: Arrangement | None) -> None:
        self.cuts, self.at, self.arranged = cuts, at, arranged


def test_another_count_of_numbers_is_refused() -> None:
    with pytest.raises(ManifestError, match="is read as"):
        make_layout("BF16", (3, 5), (Cut(((0, 4),)), Cut(((0, 4),))), Arrangement((4, 4), (1, 0)))
