"""Reading several places of files in turn, each through a window of its own that reads ahead."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path

from converter.streams.buffers import PAGE, Bytes, aligned, page_down, page_up
from converter.streams.handles import REFUSALS
from converter.streams.reading import DROP, Reader, Stamp
from shard_plans.errors import ReshardError

FEW = 4
"""Windows to begin with."""
LEAST = 128 << 10
"""Bytes of a window, at least: smaller reads cost more than reading something twice."""


@dataclass(slots=True)
class _Window:
    """What is held of one place."""

    memory: Bytes
    start: int = 0
    """Offset in the file of the first byte held; a page."""
    stop: int = 0
    used: int = 0
    """Up to where it was asked for."""


class WindowReader(Reader):
    """Reads ranges of the files of one folder, for one thread, past the page cache where the file system can.

    The memory is dealt to as many windows as there are places that are read in turn.
    """

    def __init__(
        self, folder: Path, error: type[ReshardError], sizes: Mapping[str, int], stamps: Mapping[str, Stamp], room: int
    ) -> None:
        """`room` is the memory of all windows; as much again is taken for ranges that none of them can hold."""
        super().__init__(folder, error, sizes, stamps, room)
        self._memory = aligned(max(page_up(room), FEW * LEAST))
        self._size = 0
        self._windows: OrderedDict[Hashable, _Window] = OrderedDict()
        self._free: list[Bytes] = []
        self._seen: set[Hashable] = set()
        self._divide(page_down(len(self._memory) // FEW))

    @property
    def piece(self) -> int:
        """Bytes that can be taken through a window at a time."""
        return self._size - PAGE

    def take(self, place: Hashable, name: str, offset: int, length: int, limit: int) -> memoryview:
        """`length` bytes from `offset` of the file `name`; up to `limit` the file is worth reading ahead.

        The view is into memory that the next call may fill again. Calls for one `place` should ascend.
        """
        if length > self.piece:
            return self.fetch(name, offset, length)
        window = self._windows.get(place)
        if window is None:
            window = self._windows[place] = self._new(length)
        self._windows.move_to_end(place)
        self._seen.add(place)
        if not window.start <= offset <= offset + length <= window.stop:
            self._load(window, name, offset, offset + length, max(limit, offset + length))
        window.used = offset + length
        return window.memory.data[offset - window.start : offset + length - window.start]

    def rest(self) -> None:
        """Say that other places will be read from now on: where few were, they get larger windows."""
        if len(self._seen) * 4 <= len(self._memory) // self._size and self._size * FEW < len(self._memory):
            self._windows.clear()
            self._divide(min(self._size * 2, page_down(len(self._memory) // FEW)))
        self._seen.clear()

    def _divide(self, size: int) -> None:
        """Begin anew with windows of that size."""
        self._size = size
        self._free = [self._memory[at : at + size] for at in range(0, len(self._memory) - size + 1, size)]

    def _new(self, length: int) -> _Window:
        """A window for another place, for so many bytes: a free one, the one used longest ago, or half of another."""
        if not self._free:
            oldest = next(iter(self._windows.values()))
            half = page_down(self._size // 2)
            if oldest.used < oldest.stop and half >= max(LEAST, length + PAGE):
                self._halve()
            else:
                self._free.append(self._windows.popitem(last=False)[1].memory)
        return _Window(self._free.pop())

    def _halve(self) -> None:
        """Twice as many windows; what those that are there hold and haven't given out is kept as far as it fits."""
        self._size = size = page_down(self._size // 2)
        for window in self._windows.values():
            first = page_down(window.used)
            kept = window.memory[first - window.start : min(window.stop, first + size) - window.start]
            window.memory[: len(kept)] = kept
            self._free.append(window.memory[size : 2 * size])
            window.memory, window.start, window.stop = window.memory[:size], first, first + len(kept)

    def _load(self, window: _Window, name: str, offset: int, needed: int, limit: int) -> None:
        """Fill the window from the page of `offset`: at least to `needed`, as far as it goes towards `limit`."""
        start = page_down(offset)
        stop = min(limit, start + self._size)
        done = 0
        if window.start <= start < window.stop and not window.stop % PAGE:
            kept = window.memory[start - window.start : window.stop - window.start]
            window.memory[: len(kept)] = kept
            done = len(kept)
        window.start, window.stop = start, start
        handle: int | None = None
        try:
            handle = self.direct(name)
            other = self.get(name) if handle is None else handle
            while start + done < stop:
                place = page_down(done)
                got = place + os.preadv(other, [window.memory.data[place : page_up(stop - start)]], start + place)
                if got <= done:
                    raise self._ended(name, start + done, needed)
                self.bytes_read += min(start + got, stop) - max(offset, start + done)
                done = got
            if handle is None and stop - start >= DROP and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(other, start, stop - start, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            if error.errno in REFUSALS and handle is not None:
                self.refused(name)
                self._load(window, name, offset, needed, limit)
                return
            raise self._unreadable(name, offset, error) from error
        window.stop = start + done
