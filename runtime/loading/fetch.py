"""What one loader thread does: a stretch of a file into memory, hashed as it comes, and once more behind the copy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import xxhash
from torch import Tensor

from converter.streams.reading import Reader
from runtime.loading.ports import STEP, Port
from runtime.loading.stretches import Chunk, Stretch
from shard_plans.errors import ManifestError


class Fetcher:
    """Fetches stretches, for one thread; close it at the end."""

    def __init__(self, out: Path, sizes: dict[str, int], port: Port, check: bool, again: str | None) -> None:
        """`sizes` are those of the files; `again`: the device behind whose copies everything is hashed once more."""
        self._reader = Reader(out, ManifestError, sizes)
        self._port, self._check, self._again = port, check, again

    def fetch(self, stretch: Stretch, memory: Tensor) -> None:
        """Put the stretch where it belongs in the `memory` [bytes] of its section.

        ManifestError names the file, the tensor and the bytes that differ from what the manifest states.
        """
        port, compare = self._port, self._comparison(stretch, "")
        for place, start, size in _steps(stretch):
            room = port.room(memory, place, size)
            self._reader.into(stretch.file, start, start + size, room)
            if self._check:
                compare(start, room[:size])
            port.send(memory, place, size)
        port.settle()
        if self._again is not None:
            compare = self._comparison(stretch, f" on {self._again}, after they were copied there")
            for place, start, size in _steps(stretch):
                compare(start, port.back(memory, place, size))

    def _comparison(self, stretch: Stretch, where: str) -> Callable[[int, memoryview], None]:
        """Takes the bytes of the stretch in order, a piece at a time: where in the file, and what came."""
        path, chunks, state = self._reader.folder / stretch.file, iter(stretch.chunks), xxhash.xxh3_128()
        chunk = next(chunks, None)

        def compare(start: int, data: memoryview) -> None:
            nonlocal chunk
            end = start + len(data)
            while chunk is not None and chunk.start <= end:
                state.update(data[max(chunk.start, start) - start : min(chunk.stop, end) - start])
                if chunk.stop > end:
                    return
                if state.digest() != chunk.digest:
                    raise _damaged(path, chunk, where, state.hexdigest())
                state.reset()
                chunk = next(chunks, None)

        return compare

    def close(self) -> None:
        """Close the files."""
        self._reader.close()


def _steps(stretch: Stretch) -> list[tuple[int, int, int]]:
    """Where in the memory, where in the file, and how many bytes; all but the last are whole pages."""
    shift = stretch.place - stretch.start
    starts = range(stretch.start, max(stretch.stop, stretch.start + 1), STEP)
    return [(start + shift, start, min(STEP, stretch.stop - start)) for start in starts]


def _damaged(path: Path, chunk: Chunk, where: str, found: str) -> ManifestError:
    return ManifestError(
        f"{path}, tensor {chunk.tensor}: bytes {chunk.start} to {chunk.stop} of the file have the digest {found}"
        f"{where}, the manifest states {chunk.digest.hex()}: "
        + ("the copy isn't what was read; try again, and suspect the device" if where else
           "the file was damaged; convert or copy it again")
    )  # fmt: skip
