"""Reading byte ranges of files into reused buffers, with a bounded number of files open."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from converter.faults import SourceChanged
from converter.streams.buffers import PAGE, Bytes, aligned, page_down, page_up
from converter.streams.handles import REFUSALS, Handles
from shard_plans.errors import ReshardError

DROP = 1 << 20
"""Pages of a read of this many bytes are handed back, so that a large checkpoint doesn't push out everything else."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """What tells a file from a later one of the same name."""

    size: int
    mtime_ns: int
    inode: int

    def __str__(self) -> str:
        return f"{self.size} bytes, changed at {self.mtime_ns} ns, inode {self.inode}"


def stamp_of(found: os.stat_result) -> Stamp:
    """The stamp of a file that was looked at."""
    return Stamp(found.st_size, found.st_mtime_ns, found.st_ino)


class Reader(Handles):
    """Reads ranges of the files of one folder, for one thread; a file is opened when first needed."""

    def __init__(
        self,
        folder: Path,
        error: type[ReshardError],
        sizes: Mapping[str, int] | None = None,
        stamps: Mapping[str, Stamp] | None = None,
        room: int = 0,
    ) -> None:
        """`sizes` and `stamps` say what files must be, where given; `room` is how much `fetch` takes at a time."""
        super().__init__(folder, os.O_RDONLY)
        self.error = error
        self.room = room
        self.bytes_read = 0
        self._sizes, self._stamps = sizes or {}, stamps or {}
        self._buffer: Bytes = aligned(page_up(room) + 2 * PAGE if room else 0)
        self._window = "", 0, 0
        """What the buffer holds: of which file, from where, to where."""
        self._spans: dict[str, tuple[list[int], list[int]]] = {}

    def read(self, name: str, offset: int, view: memoryview) -> memoryview:
        """Fill `view` with the bytes from `offset` of the file `name`, and return it. Raises `error` where they end."""
        done, wanted = 0, len(view)
        try:
            handle = self.get(name)
            while done < wanted:
                got = os.preadv(handle, [view[done:]], offset + done)
                if got == 0:
                    raise self._ended(name, offset + done, offset + wanted)
                done += got
            if wanted >= DROP and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(handle, offset, wanted, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise self._unreadable(name, offset + done, error) from error
        self.bytes_read += wanted
        return view

    def expect(self, name: str, spans: Sequence[tuple[int, int]]) -> None:
        """Say that all bytes of these ascending spans will be fetched from the file: they are read in large pieces."""
        self._spans[name] = [start for start, _ in spans], [stop for _, stop in spans]

    def forget(self) -> None:
        """Expect nothing more, and hold nothing."""
        self._spans.clear()
        self._window = "", 0, 0

    def fetch(self, name: str, offset: int, length: int) -> memoryview:
        """`length` bytes, at most `room`, from `offset` of the file, past the page cache where the file system can.

        The view is into a buffer that the next call may fill again.
        """
        held, first, end = self._window
        if held != name or not first <= offset <= offset + length <= end:
            first, end = self._fill(name, offset, length)
        self.bytes_read += length
        place = offset - page_down(first)
        return self._buffer.data[place : place + length]

    def _fill(self, name: str, offset: int, length: int) -> tuple[int, int]:
        """Fill the buffer from `offset` on, as far as more is expected; what it holds of that already is moved."""
        stop = offset + max(length, min(self._expected(name, offset) - offset, self.room))
        start = page_down(offset)
        held, first, end = self._window
        done = 0
        if held == name and first <= offset < end and not end % PAGE:
            kept = self._buffer[start - page_down(first) : end - page_down(first)]
            self._buffer[: len(kept)] = kept  # NumPy sees to it where they overlap
            done = len(kept)
        self._window = "", 0, 0
        handle: int | None = None
        try:
            handle = self.direct(name)
            if handle is None:
                self._read_on(self.get(name), name, start, done, stop, 1)
                if stop - offset >= DROP and hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(self.get(name), offset, stop - offset, os.POSIX_FADV_DONTNEED)
            else:
                self._read_on(handle, name, start, done, stop, PAGE)
        except OSError as error:
            if error.errno in REFUSALS and handle is not None:
                self.refused(name)
                return self._fill(name, offset, length)
            raise self._unreadable(name, offset, error) from error
        self._window = name, offset, stop
        return offset, stop

    def _read_on(self, handle: int, name: str, start: int, done: int, stop: int, unit: int) -> None:
        """Read the file from `start` + `done` to `stop`, into the buffer that begins with `start`."""
        size = -(-(stop - start) // unit) * unit
        while start + done < stop:
            place = done - done % unit  # the end of a file needn't be one of a page
            got = place + os.preadv(handle, [self._buffer.data[place:size]], start + place)
            if got <= done:
                raise self._ended(name, start + done, stop)
            done = got

    def _expected(self, name: str, offset: int) -> int:
        """Up to where bytes from `offset` on are expected."""
        starts, stops = self._spans.get(name, ([], []))
        number = bisect_right(starts, offset) - 1
        return max(offset, stops[number]) if number >= 0 else offset

    def opened(self, name: str, handle: int) -> None:
        """Raise unless the file is the one that it should be."""
        found = stamp_of(os.fstat(handle))
        expected, stamp = self._sizes.get(name), self._stamps.get(name)
        if expected is not None and found.size != expected:
            raise self._changed(
                f"{self.folder / name} has {found.size} bytes, not the {expected} it had or should have"
            )
        if stamp is not None and found != stamp:
            raise SourceChanged(f"{self.folder / name} was changed meanwhile: it had {stamp}; now it has {found}")

    def _changed(self, message: str) -> ReshardError:
        return SourceChanged(message) if issubclass(SourceChanged, self.error) else self.error(message)

    def _ended(self, name: str, end: int, needed: int) -> ReshardError:
        return self._changed(
            f"{self.folder / name} ends at byte {end}, but {needed} are needed: "
            f"it is truncated, or was changed since it was opened"
        )

    def _unreadable(self, name: str, place: int, error: OSError) -> ReshardError:
        return self.error(f"{self.folder / name} can't be read at byte {place}: {error.strerror}")
