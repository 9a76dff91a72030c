"""Where few files may be open at a time, readers and writers make do with them."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from converter.streams.buffers import PAGE, aligned
from converter.streams.reading import Reader
from converter.streams.writing import Writer
from shard_plans.errors import CheckpointError

SIZE = 5 * PAGE + 1234
DATA = np.random.default_rng(0).bytes(SIZE)


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
