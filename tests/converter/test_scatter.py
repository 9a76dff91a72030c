"""The forward engine against plain indexing, and back again: cut and put together is the identity."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from converter.backward.gather import Held, blocks, growth, items, overlap, pick, put, whole
from converter.forward import units
from converter.forward.cutting import parts
from converter.forward.grouping import Group, Target, in_bytes, make_groups, needed
from converter.forward.scatter import scatter, times
from converter.forward.shard_file import lay_out
from converter.forward.units import make_units
from converter.streams.hashing import CHUNK, TensorHash
from shard_plans.checkpoints.checkpoint import Checkpoint
from shard_plans.documents.manifest import ManifestTensor, Piece
from shard_plans.errors import PlanError
from shard_plans.placement.shards import Cut, ShardFile, ShardTensor
from tests.tools.cases import Array, Case, Collect, cases, shard_tensors, store, taken


def scattered(case: Case) -> tuple[Checkpoint, bytes, list[ShardTensor], list[bytes], int]:
    """Run the engine; returns what it was given, what each shard tensor got, and how many bytes were read."""
    checkpoint, data = store(case)
    tensors = shard_tensors(case)
    layout = lay_out(ShardFile("f", {"stage": 0}, tuple(tensors)), "0" * 32, "0" * 32)
    groups = make_groups([layout], checkpoint)
    assert len(groups) == 1
    read = 0

    def fetch(file: int, offset: int, length: int, unit: int) -> memoryview:
        nonlocal read
        assert length <= case.buffer
        if unit < length and offset % 3:  # not everything is at hand
            length = unit * -(-length // (2 * unit))
        read += length
        return memoryview(data)[offset : offset + length]

    def fill(file: int, offset: int, view: memoryview) -> None:
        view[:] = data[offset : offset + len(view)]

    found = {target.index: bytearray(target.tensor.nbytes) for target in groups[0].targets}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(units, "CHUNK", case.chunk)
        made = make_units(groups, checkpoint, case.unit)
    for unit in made:
        sinks = [Collect() for _ in unit.slices]
        for _ in scatter(unit, sinks, checkpoint, fetch, fill, case.buffer):
            pass
        for part, sink in zip(unit.slices, sinks, strict=True):
            assert part.start % case.chunk == 0
            assert not any(found[part.target.index][part.start : part.stop])
            found[part.target.index][part.start : part.stop] = sink.data
    covered = {index: 0 for index in found}
    for part in (part for unit in made for part in unit.slices):
        covered[part.target.index] += part.stop - part.start
    assert covered == {index: len(data) for index, data in found.items()}
    return checkpoint, data, tensors, [bytes(found[index]) for index in range(len(tensors))], read


def stored_array(case: Case, data: bytes, number: int) -> Array:
    size = math.prod(case.shape) * 2
    return np.frombuffer(data[number * size : (number + 1) * size], np.uint16).reshape(case.shape)


@given(cases())
@example(
    Case((3, 4), True, 2, 2, [[(Cut(((0, 4),), 2), Cut(((1, 7),), 2)), (Cut(((2, 6),), 2), Cut(((1, 7),), 2))]], 1, 2)
)
def test_every_target_gets_its_elements_in_order(case: Case) -> None:
    _, data, tensors, found, _ = scattered(case)
    for tensor, cuts, got in zip(tensors, case.cuts, found, strict=True):
        expected = np.zeros(tensor.shape, np.uint16)
        for expert in range(case.experts):
            target = expected[expert] if case.stacked else expected
            for source, member in zip(tensor.sources, range(case.members), strict=True):
                part = taken(stored_array(case, data, expert * case.members + member), cuts[member])
                target[source.at[0] : source.at[0] + len(part)] = part
        assert got == expected.tobytes()


@given(cases())
def test_the_way_back_finds_every_element_again(case: Case) -> None:
    _, data, tensors, found, _ = scattered(case)
    item, shape = items("BF16", case.shape)
    for number in range(case.members * case.experts):
        stored = stored_array(case, data, number)
        expert, member = divmod(number, case.members)
        holders = []
        for tensor in tensors:
            source = tensor.sources[member]
            piece = Piece(source.pattern, source.experts, source.cuts, source.at)
            entry = ManifestTensor(
                tensor.name, "BF16", tensor.shape, 0, tensor.nbytes, None, "values", None, "", b"", ()
            )
            holders.append(Held(0, entry, piece, expert if case.stacked else None))
        made, covered = np.zeros_like(stored), np.zeros(case.shape, np.bool_)
        for block in blocks(shape, item, max(item, case.buffer // growth(holders))):
            window = tuple(slice(*span) for span in block)
            for tensor, held, data_of in zip(tensors, holders, found, strict=True):
                where = overlap(held, block)
                if where is None:
                    continue
                spans, indexes = where
                array = np.frombuffer(data_of, np.uint16).reshape(tensor.shape)
                image = (array[expert] if case.stacked else array)[tuple(slice(*span) for span in spans)]
                assert np.array_equal(image, pick(stored[window], indexes))
                put(made[window], indexes, image)
                put(covered[window], indexes, True)
                if whole(indexes, stored[window].shape):
                    assert covered[window].all()
        expected = np.zeros(case.shape, np.bool_)
        for cuts in case.cuts:
            axes = [np.zeros(size, np.bool_) for size in case.shape]
            for axis, cut in zip(axes, cuts[member], strict=True):
                for start, stop in cut.runs:
                    axis[[place // cut.repeat for place in range(start, stop)]] = True
            expected |= reduce(np.logical_and.outer, axes)
        assert np.array_equal(covered, expected)
        assert np.array_equal(made, np.where(expected, stored, 0))


def test_ranks_share_one_read() -> None:
    halves = [
        [(Cut(((0, 3),)), Cut(((0, 4),)))],
        [(Cut(((3, 6),)), Cut(((0, 4),)))],
        [(Cut(((0, 6),)), Cut(((1, 3),)))],
    ]
    assert scattered(Case((6, 4), False, 1, 1, halves, 0, 4096))[4] == 6 * 4 * 2


def test_rows_that_nobody_needs_are_not_read() -> None:
    ends = [[(Cut(((0, 1), (5, 6))), Cut(((0, 4),)))]]
    assert scattered(Case((6, 4), False, 1, 1, ends, 0, 4096))[4] == 2 * 4 * 2


def test_needed_ranges_are_merged() -> None:
    assert needed([Cut(((0, 4),), 2), Cut(((1, 3), (7, 9))), Cut(((5, 5),))]) == [(0, 3), (7, 9)]
    assert needed([]) == []


def test_times_counts_repeats() -> None:
    assert [times(Cut(((1, 5),), 2), index) for index in range(4)] == [1, 2, 1, 0]


def test_parts_of_a_repeated_row() -> None:
    rows = list(parts(np.array([[1], [2]], np.uint8), 4, (Cut(((9, 12),), 2), Cut(((0, 1),)))))
    assert [row.ravel().tolist() for row in rows] == [[1, 2, 2]]


def test_packed_types_are_cut_on_bytes() -> None:
    assert in_bytes("F4", (2, 8), (Cut(((0, 2),)), Cut(((2, 6),)))) == (1, (2, 4), (Cut(((0, 2),)), Cut(((1, 3),))))
    assert in_bytes("F32", (), ()) == (4, (1,), (Cut(((0, 1),)),))
    with pytest.raises(PlanError, match="inside a byte"):
        in_bytes("F4", (2, 8), (Cut(((0, 2),)), Cut(((1, 6),))))


Spoil = Callable[[ShardTensor], ShardTensor]


def recut(tensor: ShardTensor, **fields: Any) -> ShardTensor:
    return replace(tensor, sources=(replace(tensor.sources[0], **fields), *tensor.sources[1:]))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: replace(t, dtype="F32", shape=t.shape), "is stored as BF16, the shard holds F32"),
        (lambda t: recut(t, at=(2, 0)), "sources overlap"),
        (lambda t: recut(t, at=(0, 1)), "whole rows"),
        (lambda t: recut(t, cuts=(Cut(((2, 5),)), Cut(((0, 4),)))), "is cut at 2:5, behind 0, of 3"),
        (lambda t: recut(t, tensors=np.array([9])), "is number 9 of 2"),
    ],
)
def test_a_placement_that_contradicts_itself_is_refused(spoil: Spoil, message: str) -> None:
    full = (Cut(((0, 3),)), Cut(((0, 4),)))
    case = Case((3, 4), False, 1, 2, [[full, full]], 0, 64)
    layout = lay_out(ShardFile("f", {"stage": 0}, (spoil(shard_tensors(case)[0]),)), "0" * 32, "0" * 32)
    with pytest.raises(PlanError, match=message):
        make_groups([layout], store(case)[0])


def test_a_tensor_without_sources_is_all_padding() -> None:
    tensor = ShardTensor("embed", "BF16", (4, 8), ())
    sink = Collect()
    group = Group(np.zeros(0, np.int64), (Target(0, 0, tensor, (), 0),))
    checkpoint = store(Case((1,), False, 1, 1, [], 0, 8))[0]
    (unit,) = make_units([group], checkpoint)
    assert list(scatter(unit, [sink], checkpoint, lambda *_: memoryview(b""), lambda *_: None, 8)) == []
    assert sink.data == bytes(64)


@given(st.integers(0, 3), st.integers(-2, 2), st.lists(st.floats(0, 1), max_size=6))
def test_tensor_digests_do_not_depend_on_the_pieces(chunks: int, more: int, borders: list[float]) -> None:
    data = memoryview(bytes(range(256)) * (3 * CHUNK // 256 + 1))[: max(0, chunks * CHUNK + more)]
    state = TensorHash()
    places = [0, *sorted(int(border * len(data)) for border in borders), len(data)]
    for start, stop in pairwise(places):
        state.update(data[start:stop])
    digest = state.finish()
    pieces = [xxhash.xxh3_128_digest(data[start : start + CHUNK]) for start in range(0, len(data), CHUNK)]
    if len(data) <= CHUNK:
        assert (digest.xxh3, digest.chunks) == (xxhash.xxh3_128_hexdigest(data), b"")
    else:
        assert (digest.xxh3, digest.chunks) == (xxhash.xxh3_128_hexdigest(b"".join(pieces)), b"".join(pieces))
