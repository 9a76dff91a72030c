"""Byte ranges are read as asked, ahead or not, on file systems with direct I/O and without."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from converter.faults import SourceChanged
from converter.streams.buffers import PAGE
from converter.streams.reading import Reader, Stamp
from shard_plans.errors import CheckpointError, ManifestError
from tests.tools.file_systems import MODES, file_system

SIZE = 5 * PAGE + 1234
LONG = 80 * PAGE + 77
DATA = np.random.default_rng(0).bytes(SIZE)


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
@given(plan=plans(), room=st.sampled_from([2, 3, 40]), ahead=st.integers(0, 2))
def test_what_is_expected_is_read_ahead(
    tmp_path_factory: pytest.TempPathFactory,
    mode: str,
    plan: tuple[list[tuple[str, int, int]], list[tuple[str, int, int, int]]],
    room: int,
    ahead: int,
) -> None:
    folder = tmp_path_factory.getbasetemp()
    data = {"one": bytes(range(251)) * (LONG // 251 + 1), "two": DATA * (LONG // SIZE + 1)}
    data = {name: found[:LONG] for name, found in data.items()}
    for name, found in data.items():
        if not (folder / name).exists():
            (folder / name).write_bytes(found)
    spans, asked = plan
    with file_system(mode), Reader(folder, CheckpointError, room=room * PAGE, ahead=ahead) as reader:
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
    ahead=st.integers(0, 2),
)
def test_spans_are_passed_fetched_or_not(
    tmp_path_factory: pytest.TempPathFactory, mode: str, spans: list[tuple[int, int, float]], room: int, ahead: int
) -> None:
    folder, data = tmp_path_factory.getbasetemp(), (bytes(range(251)) * (LONG // 251 + 1))[:LONG]
    for name in ("even", "odd"):
        (folder / name).write_bytes(data) if not (folder / name).exists() else None
    listed = [(start, min(start + size, LONG), share) for start, size, share in spans]
    with file_system(mode), Reader(folder, CheckpointError, room=room * PAGE, ahead=ahead) as reader:
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


def test_another_file_of_the_name_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(DATA)
    stamps = {"file": Stamp(SIZE, 1, 2)}
    reader = Reader(tmp_path, CheckpointError, stamps=stamps, room=PAGE)
    with reader, pytest.raises(SourceChanged, match="was changed meanwhile"):
        reader.fetch("file", 0, 10)
    reader = Reader(tmp_path, ManifestError, {"file": 3}, room=PAGE)
    with reader, pytest.raises(ManifestError, match=f"has {SIZE} bytes, not the 3"):
        reader.fetch("file", 0, 10)


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
