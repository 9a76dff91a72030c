"""Windows: whatever is read in turn, in whatever pieces, is what lies in the files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from converter.sources import windows
from converter.sources.windows import WindowReader
from shard_plans.errors import ManifestError

SIZE = 300_001
PLACES = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("windows")
    for number in range(2):
        (made / str(number)).write_bytes(np.random.default_rng(number).bytes(SIZE))
    return made


@settings(max_examples=25)
@given(
    steps=st.lists(st.tuples(st.integers(0, PLACES - 1), st.integers(1, 40_000), st.integers(0, 50_000)), max_size=80),
    rest=st.sets(st.integers(0, 80), max_size=3),
    direct=st.booleans(),
)
def test_what_is_read_is_what_lies_there(
    folder: Path, steps: list[tuple[int, int, int]], rest: set[int], direct: bool
) -> None:
    data = [(folder / str(number)).read_bytes() for number in range(2)]
    at = [place * SIZE // PLACES for place in range(PLACES)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "LEAST", 8192)
        if not direct:
            patch.setattr(WindowReader, "direct", lambda *_: None)
        with WindowReader(folder, ManifestError, {}, {}, 128 << 10) as reader:
            for number, (place, length, ahead) in enumerate(steps):
                file, start = place % 2, at[place]
                length = min(length, SIZE - start)
                view = reader.take(place, str(file), start, length, min(start + length + ahead, SIZE))
                assert bytes(view) == data[file][start : start + length]
                at[place] += length
                if number in rest:
                    reader.rest()


def test_places_in_turn_are_read_once(folder: Path) -> None:
    with WindowReader(folder, ManifestError, {}, {}, 4 << 20) as reader:
        for start in range(0, SIZE, 1000):
            for number in range(2):
                reader.take(number, str(number), start, min(1000, SIZE - start), SIZE)
        assert reader.bytes_read == 2 * SIZE


def test_a_file_that_ends_is_named(folder: Path) -> None:
    with (
        WindowReader(folder, ManifestError, {}, {}, 1 << 20) as reader,
        pytest.raises(ManifestError, match=rf"0 ends at byte {SIZE}, but {SIZE + 10} are needed"),
    ):
        reader.take(0, "0", SIZE - 10, 20, SIZE + 20)
