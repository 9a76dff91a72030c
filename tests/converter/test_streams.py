"""Reading and writing past the page cache, and through it where the file system refuses, at open or at first use."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from converter.faults import SourceChanged
from converter.streams import handles
from converter.streams.buffers import PAGE, aligned
from converter.streams.hashing import whole_digest
from converter.streams.reading import Reader, Stamp
from converter.streams.sink import Place, Sink, Staging
from converter.streams.writing import Writer
from shard_plans.errors import CheckpointError, ManifestError
from tests.conftest import MakeCheckpoint
from tests.tools.converted import contents, converted

SIZE = 5 * PAGE + 1234
LONG = 80 * PAGE + 77
DATA = np.random.default_rng(0).bytes(SIZE)
MODES = ["direct", "none", "refused when opened", "refused when used"]


@contextmanager
def file_system(mode: str) -> Iterator[None]:
    """The system's calls, as file systems without direct I/O answer them."""
    with pytest.MonkeyPatch.context() as patch:
        real: dict[str, Any] = {name: getattr(os, name) for name in ("open", "preadv", "pwrite")}

        def opened(path: Any, flags: int, *rest: Any) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "no")
            return int(real["open"](path, flags, *rest))

        def used(name: str) -> Any:
            def call(handle: int, *rest: Any) -> int:
                if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT:
                    raise OSError(errno.EINVAL, "no")
                return int(real[name](handle, *rest))

            return call

        if mode == "none":
            patch.setattr(handles, "DIRECT", 0)
        elif mode == "refused when opened":
            patch.setattr(os, "open", opened)
        elif mode == "refused when used":
            for name in ("preadv", "pwrite"):
                patch.setattr(os, name, used(name))
        yield


@pytest.mark.parametrize("mode", MODES)
@given(ranges=st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, 2 * PAGE)), max_size=8))
def test_any_range_is_read(tmp_path_factory: pytest.TempPathFactory, mode: str, ranges: list[tuple[int, int]]) -> None:
    folder = tmp_path_factory.getbasetemp()
    path = folder / "read"
    if not path.exists():
        path.write_bytes(DATA)
    with file_system(mode), Reader(folder, CheckpointError, room=2 * PAGE) as reader:
        for start, length in ranges:
            length = min(length, SIZE - start)
            assert reader.fetch("read", start, length) == DATA[start : start + length]
        if not ranges:
            with pytest.raises(CheckpointError, match=f"ends at byte {SIZE}, but {SIZE + 1} are needed"):
                reader.fetch("read", SIZE - 10, 11)


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[tuple[str, int, int]], list[tuple[str, int, int, int]]]:
    """Spans of two files that are expected, and what is asked for: all of them in order, and other ranges between."""
    spans, asked = [], []
    for name in ("one", "two"):
        borders = sorted(draw(st.lists(st.integers(0, LONG), min_size=2, max_size=8)))
        for start, stop in zip(borders[::2], borders[1::2], strict=False):
            spans.append((name, start, stop))
            while start < stop:
                unit = draw(st.integers(1, 2 * PAGE))
                many = draw(st.integers(1, 40))
                if draw(st.integers(0, 9)) == 0:
                    other = draw(st.integers(0, LONG - 2 * PAGE))
                    asked.append((draw(st.sampled_from(["one", "two"])), other, 2 * PAGE, 1))
                asked.append((name, start, min(unit * many, stop - start), min(unit, stop - start)))
                start += asked[-1][2]
    return spans, asked


@pytest.mark.parametrize("mode", MODES)
@given(plan=plans(), room=st.sampled_from([2, 3, 40]))
def test_what_is_expected_is_read_ahead(
    tmp_path_factory: pytest.TempPathFactory,
    mode: str,
    plan: tuple[list[tuple[str, int, int]], list[tuple[str, int, int, int]]],
    room: int,
) -> None:
    folder = tmp_path_factory.getbasetemp()
    data = {"one": bytes(range(251)) * (LONG // 251 + 1), "two": DATA * (LONG // SIZE + 1)}
    data = {name: found[:LONG] for name, found in data.items()}
    for name, found in data.items():
        if not (folder / name).exists():
            (folder / name).write_bytes(found)
    spans, asked = plan
    with file_system(mode), Reader(folder, CheckpointError, room=room * PAGE) as reader:
        for name, start, stop in spans:
            reader.expect(name, [(start, stop)])
        for name, start, length, unit in asked:
            stop = start + length // unit * unit
            while start < stop:
                view = reader.some(name, start, min(stop - start, max(unit, room * PAGE)), unit)
                assert len(view) % unit == 0 and view
                assert view == data[name][start : start + len(view)]
                start += len(view)
        reader.forget()
        with pytest.raises(CheckpointError, match=f"ends at byte {LONG}, but {LONG + 1} are needed"):
            reader.expect("one", [(LONG - 10, LONG + 1)])
            reader.fetch("one", LONG - 10, 11)


@pytest.mark.parametrize("mode", MODES)
@given(
    spans=st.lists(
        st.tuples(st.integers(0, LONG - 1), st.integers(1, 9 * PAGE), st.floats(0, 1)), min_size=1, max_size=8
    ),
    room=st.sampled_from([2, 3]),
)
def test_spans_are_passed_fetched_or_not(
    tmp_path_factory: pytest.TempPathFactory, mode: str, spans: list[tuple[int, int, float]], room: int
) -> None:
    folder, data = tmp_path_factory.getbasetemp(), (bytes(range(251)) * (LONG // 251 + 1))[:LONG]
    for name in ("even", "odd"):
        (folder / name).write_bytes(data) if not (folder / name).exists() else None
    listed = [(start, min(start + size, LONG), share) for start, size, share in spans]
    with file_system(mode), Reader(folder, CheckpointError, room=room * PAGE) as reader:
        reader.expect("even", [listed[0][:2]])
        for number, (start, stop, share) in enumerate(listed):
            if number + 1 < len(listed):
                reader.expect(("odd", "even")[number % 2], [listed[number + 1][:2]])
            end = start + round((stop - start) * share)
            while start < end:
                view = reader.some(("even", "odd")[number % 2], start, end - start)
                assert view and view == data[start : start + len(view)]
                start += len(view)
            reader.passed(1)


@pytest.mark.parametrize("mode", MODES)
@given(
    start=st.integers(0, 3).map(lambda page: page * PAGE) | st.integers(0, 9000),
    room=st.integers(1, 3),
    borders=st.lists(st.integers(0, SIZE // 2), max_size=6),
    columns=st.sampled_from([1, 3, 700]),
)
def test_what_a_sink_takes_is_written_and_hashed(
    tmp_path_factory: pytest.TempPathFactory, mode: str, start: int, room: int, borders: list[int], columns: int
) -> None:
    folder = tmp_path_factory.getbasetemp()
    path = folder / f"written-{mode.replace(' ', '-')}"
    path.write_bytes(bytes(start + SIZE + PAGE))
    items = np.frombuffer(DATA, np.uint16)
    with file_system(mode), Writer(folder) as writer:
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


@pytest.mark.parametrize("mode", MODES)
def test_the_same_output_on_every_file_system(tiny: MakeCheckpoint, tmp_path: Path, mode: str) -> None:
    converted(tiny("deepseek_v3_mtp"), tmp_path / "one", {"tp": 2, "ep": 2})
    with file_system(mode):
        converted(tiny("deepseek_v3_mtp"), tmp_path / "two", {"tp": 2, "ep": 2})
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_large_writes_through_the_cache(tmp_path: Path) -> None:
    data = aligned(1 << 20)
    data[:] = 7
    (tmp_path / "file").write_bytes(b"")
    with file_system("none"), Writer(tmp_path) as writer:
        for number in range(4):
            writer.write("file", number << 20, data.data, aligned=True)
    assert (tmp_path / "file").read_bytes() == b"\7" * (4 << 20)


def test_another_file_of_the_name_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(DATA)
    stamps = {"file": Stamp(SIZE, 1, 2)}
    reader = Reader(tmp_path, CheckpointError, stamps=stamps, room=PAGE)
    with reader, pytest.raises(SourceChanged, match="was changed meanwhile"):
        reader.fetch("file", 0, 10)
    reader = Reader(tmp_path, ManifestError, {"file": 3}, room=PAGE)
    with reader, pytest.raises(ManifestError, match=f"has {SIZE} bytes, not the 3"):
        reader.fetch("file", 0, 10)


@contextmanager
def few_files(count: int) -> Iterator[None]:
    """No more files than so many can be opened besides those that are: every lower number is taken, too."""
    before, taken = resource.getrlimit(resource.RLIMIT_NOFILE), [os.dup(0)]
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    while taken[-1] <= highest:
        taken.append(os.dup(0))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken[-1] + 1 + count, before[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for handle in taken:
            os.close(handle)


@pytest.fixture
def crowd(tmp_path: Path) -> Path:
    """A folder of 40 files."""
    for number in range(40):
        (tmp_path / str(number)).write_bytes(DATA)
    return tmp_path


def test_a_worker_makes_do_with_fewer_open_files(crowd: Path) -> None:
    with few_files(12), Reader(crowd, CheckpointError, room=PAGE) as reader:
        for number in range(80):
            assert reader.fetch(str(number % 40), 100, 50) == DATA[100:150]
        with pytest.raises(OSError, match="Too many"):
            [os.dup(0) for _ in range(12)]


def test_so_does_one_that_reads_ahead(crowd: Path) -> None:
    with few_files(12), Reader(crowd, CheckpointError, room=PAGE) as reader:
        for number in range(40):
            reader.expect(str(number), [(0, SIZE)])
        for number in range(40):
            for at in range(0, SIZE, PAGE):
                size = min(PAGE, SIZE - at)
                assert reader.fetch(str(number), at, size) == DATA[at : at + size]
            reader.passed(1)


def test_so_does_one_that_writes_behind(crowd: Path) -> None:
    data = aligned(1 << 20)
    data[:] = 7
    with few_files(12), Writer(crowd) as writer:
        for number in range(40):
            writer.later(str(number), 0, data.data)
        writer.finish()
    assert all((crowd / str(number)).read_bytes() == data.tobytes() for number in range(40))


def test_sinks_share_memory_by_what_they_need() -> None:
    shares = Staging(8 * PAGE).shares([1] * 100)
    assert {len(share) for share in shares} == {PAGE}
    assert not any(share.ctypes.data % PAGE for share in shares)
    assert [len(share) // PAGE for share in Staging(8 * PAGE).shares([10**6, 5, 10**6, PAGE + 1])] == [2, 1, 3, 2]
    assert [len(share) // PAGE for share in Staging(8 * PAGE).shares([10**6])] == [8]


@pytest.mark.parametrize("mode", MODES)
@given(
    borders=st.lists(st.integers(0, SIZE), max_size=6),
    steps=st.lists(st.integers(1, 2 * PAGE), min_size=1, max_size=20),
    skip=st.sampled_from([0, 0, 1, 5000]),
)
def test_what_is_expected_is_read_ahead_and_right(
    tmp_path_factory: pytest.TempPathFactory, mode: str, borders: list[int], steps: list[int], skip: int
) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / "ahead").write_bytes(DATA)
    ends = sorted({*borders, SIZE})
    with file_system(mode), Reader(folder, CheckpointError, room=2 * PAGE) as reader:
        reader.expect("ahead", list(zip(ends[::2], ends[1::2], strict=False)))
        place = 0
        for length in steps:
            length = min(length, SIZE - place)
            assert reader.fetch("ahead", place, length) == DATA[place : place + length]
            place = min(SIZE, place + length + skip)
