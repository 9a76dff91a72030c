"""What is written and hashed is what was given, on file systems with direct I/O and without."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from converter.streams.buffers import PAGE, aligned
from converter.streams.hashing import whole_digest
from converter.streams.sink import HOT, Place, Sink, Staging
from converter.streams.writing import Writer
from tests.conftest import MakeCheckpoint
from tests.tools.converted import contents, converted
from tests.tools.file_systems import MODES, file_system

SIZE = 5 * PAGE + 1234
DATA = np.random.default_rng(0).bytes(SIZE)


@pytest.mark.parametrize("mode", MODES)
@given(
    start=st.integers(0, 3).map(lambda page: page * PAGE) | st.integers(0, 9000),
    room=st.integers(1, 3),
    borders=st.lists(st.integers(0, SIZE // 2), max_size=6),
    columns=st.sampled_from([1, 3, 700]),
    hot=st.sampled_from([2, 1000, PAGE, HOT]),
)
def test_what_a_sink_takes_is_written_and_hashed(
    tmp_path_factory: pytest.TempPathFactory, mode: str, start: int, room: int, borders: list[int], columns: int,
    hot: int,
) -> None:  # fmt: skip
    folder = tmp_path_factory.getbasetemp()
    path = folder / f"written-{mode.replace(' ', '-')}"
    path.write_bytes(bytes(start + SIZE + PAGE))
    items = np.frombuffer(DATA, np.uint16)
    with file_system(mode), patch("converter.streams.sink.HOT", hot), Writer(folder) as writer:
        share = Staging(room * PAGE).shares([SIZE + PAGE])[0]
        sink = Sink(writer, Place(path.name, start, 0, SIZE + PAGE), share, lambda _: None)
        for first, last in pairwise([0, *sorted(borders), len(items)]):
            whole = (last - first) // columns * columns
            wide = np.zeros((whole // columns, columns + 2), np.uint16)  # not contiguous, as after a column cut
            wide[:, 1:-1] = items[first : first + whole].reshape(-1, columns)
            sink.take(wide[:, 1:-1])
            sink.take(items[first + whole : last])
        sink.zeros(PAGE)
        assert sink.seen == SIZE + PAGE
        digest = whole_digest(sink.finish())
        writer.finish()
    assert path.read_bytes() == bytes(start) + DATA + bytes(PAGE)
    assert digest.xxh3 == xxhash.xxh3_128_hexdigest(DATA + bytes(PAGE))


def test_sinks_share_memory_by_what_they_need() -> None:
    shares = Staging(8 * PAGE).shares([1] * 100)
    assert {len(share) for share in shares} == {PAGE}
    assert not any(share.ctypes.data % PAGE for share in shares)
    assert [len(share) // PAGE for share in Staging(8 * PAGE).shares([10**6, 5, 10**6, PAGE + 1])] == [2, 1, 3, 2]
    assert [len(share) // PAGE for share in Staging(8 * PAGE).shares([10**6])] == [8]


def test_large_writes_through_the_cache(tmp_path: Path) -> None:
    data = aligned(1 << 20)
    data[:] = 7
    (tmp_path / "file").write_bytes(b"")
    with file_system("none"), Writer(tmp_path) as writer:
        for number in range(4):
            writer.write("file", number << 20, data.data, aligned=True)
    assert (tmp_path / "file").read_bytes() == b"\7" * (4 << 20)


@pytest.mark.parametrize("mode", MODES)
def test_the_same_output_on_every_file_system(tiny: MakeCheckpoint, tmp_path: Path, mode: str) -> None:
    converted(tiny("deepseek_v3_mtp"), tmp_path / "one", {"tp": 2, "ep": 2})
    with file_system(mode):
        converted(tiny("deepseek_v3_mtp"), tmp_path / "two", {"tp": 2, "ep": 2})
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
