"""Which stretches of a file are read: every byte once, no page by two threads, each tensor in one piece of memory."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from converter.streams.buffers import PAGE, page_down, page_up
from runtime.loading.stretches import LENGTH, arrange
from shard_plans.documents.digests import CHUNK
from shard_plans.documents.manifest import ManifestTensor, ShardManifest

SIZES = st.one_of(st.integers(0, 3 * PAGE), st.integers(0, 12).map(lambda n: n * CHUNK), st.integers(0, 6 * CHUNK))


def manifest(sizes: list[int]) -> ShardManifest:
    """A file of tensors of these sizes, one behind the other."""
    tensors, at = [], 0
    for number, size in enumerate(sizes):
        chunks = bytes(16 * -(-size // CHUNK)) if size > CHUNK else b""
        tensors.append(
            ManifestTensor(f"t{number}", "U8", (size,), at, size, None, "values", None, "0" * 32, chunks, ())
        )
        at += size
    return ShardManifest("file", {}, "", "", PAGE + at, PAGE, "", tuple(tensors))


@given(st.lists(st.tuples(SIZES, st.booleans()), min_size=1, max_size=8))
def test_every_byte_once_and_no_page_twice(drawn: list[tuple[int, bool]]) -> None:
    shard = manifest([size for size, _ in drawn])
    wanted = [t for t, (_, chosen) in zip(shard.tensors, drawn, strict=True) if chosen]
    found = arrange([(shard, wanted)])
    chunks = [chunk for stretch in found.stretches for chunk in stretch.chunks]
    for tensor in wanted:
        own = sorted((c.start, c.stop) for c in chunks if c.tensor == tensor.name)
        assert own[0][0] == PAGE + tensor.offset and own[-1][1] == PAGE + tensor.offset + tensor.nbytes
        assert all(a[1] == b[0] for a, b in pairwise(own))
    pages = sorted((s.place, s.place + page_up(s.stop) - s.start) for s in found.stretches)
    assert all(a[1] <= b[0] for a, b in pairwise(pages))
    assert not pages or pages[-1][1] <= page_up(found.nbytes)
    for stretch in found.stretches:
        assert stretch.start == page_down(stretch.chunks[0].start) and stretch.place % PAGE == 0
    shifts = {(s.place - s.start, c.tensor) for s in found.stretches for c in s.chunks}
    for _, tensor, place in found.places:
        assert {shift for shift, name in shifts if name == tensor.name} == {place - PAGE - tensor.offset}


def test_long_tensors_are_read_by_several_threads() -> None:
    shard = manifest([10 * CHUNK, 100])
    stretches = arrange([(shard, shard.tensors)]).stretches
    assert len(stretches) == 3
    assert all(s.stop - s.start >= LENGTH for s in stretches[:-1])
