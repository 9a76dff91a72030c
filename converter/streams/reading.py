"""Reading byte ranges of files into reused buffers, with a bounded number of files open."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from converter.faults import SourceChanged
from converter.streams.ahead import Ahead, Window, make_window
from converter.streams.buffers import PAGE, page_down, page_up
from converter.streams.handles import REFUSALS, Handles
from shard_plans.errors import ReshardError

DROP = 1 << 20
"""Pages of a read of this many bytes are handed back, so that a large checkpoint doesn't push out everything else."""

WINDOW = 4 << 20
"""Bytes read ahead at a time: as many as one request of most disks, so that what is used is still in the cache."""
Span = tuple[str, int, int]
"""Name of a file, first byte, end."""


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
        window: int = WINDOW,
        ahead: int = 2,
    ) -> None:
        """`sizes` and `stamps` say what files must be, where given; `room` is how much `fetch` takes at a time.

        What is expected is read ahead into `ahead` windows of `window` bytes, beside the one in use; with none, when it
        is fetched.
        """
        super().__init__(folder, os.O_RDONLY)
        self.error = error
        self.room = room
        self.bytes_read = 0
        self._sizes, self._stamps = sizes or {}, stamps or {}
        self._own = self._window = make_window(room)
        """The window for what wasn't read ahead, and the one in use."""
        self._ahead = Ahead(min(room, window), ahead)
        self._spans: list[Span] = []
        self._next = 0, 0
        """Which span is read ahead next, and from where."""

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
        """Say that all bytes of these ascending spans will be fetched from the file, after those named before.

        They are read in large pieces, each while the one before is used.
        """
        self._spans += [(name, start, stop) for start, stop in spans if start < stop]
        self._read_ahead()

    def passed(self, count: int) -> None:
        """Expect nothing more of the first `count` spans; what comes behind them is still read ahead."""
        del self._spans[:count]
        number, at = self._next
        self._next = (number - count, at) if number >= count else (0, 0)
        if self._ahead.busy and not any(self._ahead.reads(*span) for span in self._spans):
            self._ahead.drop()  # not everything was fetched
            self._next = 0, 0
        self._read_ahead()

    def forget(self) -> None:
        """Expect nothing more, and hold nothing."""
        self._ahead.drop()
        self._spans, self._next = [], (0, 0)
        self._use(self._own)
        self._own.clear()

    def fetch(self, name: str, offset: int, length: int) -> memoryview:
        """`length` bytes, at most `room`, from `offset` of the file, past the page cache where the file system can.

        The view is into a buffer that the next call may fill again.
        """
        self._bring(name, offset, length)
        self.bytes_read += length
        return self._window.view(offset, length)

    def some(self, name: str, offset: int, length: int, unit: int = 1) -> memoryview:
        """The same, but of `length` bytes as many whole units as are at hand, and at least one."""
        self._bring(name, offset, min(length, unit))
        found = min(length, self._window.end - offset)
        found -= found % unit if found > unit else 0
        self.bytes_read += found
        return self._window.view(offset, found)

    def into(self, name: str, start: int, stop: int, room: memoryview) -> None:
        """Fill `room`, whole pages of memory, with the file from the page `start` on, up to `stop` at least.

        Past the page cache where the file system can. Raises `error` where the file ends before.
        """
        self._read_pages(name, start, 0, stop, room)
        self.bytes_read += stop - start

    def _bring(self, name: str, offset: int, length: int) -> None:
        """Have these bytes in the window."""
        if self._window.holds(name, offset, length):
            return
        if self._ahead.offers(self._window, name, offset, length):
            window = self._ahead.take(self._window, offset, length)
            if window is not None:
                self._use(window)
                self._read_ahead()
                return
        self._fill(name, offset, length)

    def _use(self, window: Window) -> None:
        """Go over to another window."""
        if self._window is not window and self._window is not self._own:
            self._ahead.free.append(self._window)
        self._window = window

    def _fill(self, name: str, offset: int, length: int) -> None:
        """Fill the window from the page of `offset`, as far as more is expected; what it holds of that is moved."""
        stop = offset + max(length, min(self._expected(name, offset) - offset, self.room))
        start, window, done = page_down(offset), self._own, 0
        if self._window.holds(name, start, 1) and not self._window.end % PAGE:
            done = window.keep(self._window.view(start, self._window.end - start))
        self._use(window)
        window.clear()
        end = self._read_pages(name, start, done, stop, window.room)
        window.name, window.start, window.end = name, start, end
        if not self._ahead.busy or self._ahead.passed(name, end):
            self._go_on(name, end)

    def _handle(self, name: str) -> tuple[int, bool]:
        """A descriptor of the file, and whether it bypasses the page cache."""
        try:
            handle = self.direct(name)
            return (self.get(name), False) if handle is None else (handle, True)
        except OSError as error:
            raise self._unreadable(name, 0, error) from error

    def _read_pages(self, name: str, start: int, done: int, stop: int, room: memoryview) -> int:
        """Read a file from the page `start` into `room`, which has `done` bytes of it; up to where it has it then."""
        handle, direct = self._handle(name)
        try:
            end = self._pull(handle, direct, start, done, stop, room)
        except OSError as error:
            if error.errno not in REFUSALS or not direct:
                raise self._unreadable(name, start + done, error) from error
            self.refused(name)
            return self._read_pages(name, start, done, stop, room)
        if end < stop:
            raise self._ended(name, end, stop)
        return end

    @staticmethod
    def _pull(handle: int, direct: bool, start: int, done: int, stop: int, room: memoryview) -> int:
        """Read a file from the page `start` until `stop` is there, or it ends, into `room`, which has `done` bytes.

        Returns up to where it has it. No page is read twice: the next piece goes on where this one ends.
        """
        room = room[: page_up(stop - start)]
        while start + done < stop:
            whole = page_down(done)  # the end of a file needn't be one of a page
            got = whole + os.preadv(handle, [room[whole:]], start + whole)
            if got <= done:
                break
            done = got
        if done >= DROP and not direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(handle, start, done, os.POSIX_FADV_DONTNEED)
        return start + done

    def _read_ahead(self) -> None:
        """Begin to read the next pieces of what is expected."""
        while self._next[0] < len(self._spans) and not self._ahead.full:
            number, at = self._next
            name, start, end = self._spans[number]
            start = page_down(max(start, at))
            stop = min(end, start + max(PAGE, page_down(self._ahead.room)))
            self._next = (number, stop) if stop < end else (number + 1, 0)
            handle, direct = self._handle(name)
            self._ahead.begin(name, start, stop, partial(self._pull, handle, direct, start, 0, stop))

    def _go_on(self, name: str, offset: int) -> None:
        """After a piece that wasn't read ahead: go on behind it, where it is of a span."""
        self._ahead.drop()
        for number, (whose, start, stop) in enumerate(self._spans):
            if whose == name and start <= offset < stop:
                self._next = number, offset
                break
        self._read_ahead()

    def _expected(self, name: str, offset: int) -> int:
        """Up to where bytes from `offset` on are expected."""
        return max((stop for whose, start, stop in self._spans if whose == name and start <= offset), default=offset)

    def settle(self) -> None:
        """Wait until no file is read ahead."""
        self._ahead.settle()

    def close(self) -> None:
        """Close every file, and end the thread that reads ahead."""
        super().close()
        self._ahead.close()

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
