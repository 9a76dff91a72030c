"""Windows on files: what was read of one into memory, and the next piece on its way in a thread of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from converter.streams.buffers import PAGE, Bytes, aligned, page_down, page_up

HEAD = 1 << 20
"""Bytes of room before what is read: the end of the window before is put there, so that both are one."""


@dataclass(slots=True)
class Window:
    """Bytes `start` to `end` of the file `name`."""

    memory: Bytes
    head: int
    """Where in the memory what is read begins."""
    name: str = ""
    start: int = 0
    end: int = 0
    before: int = 0
    """How many of the bytes are before what was read."""

    @property
    def room(self) -> memoryview:
        """Where what is read goes."""
        return self.memory.data[self.head :]

    def holds(self, name: str, offset: int, length: int) -> bool:
        """Whether all of these bytes are here."""
        return name == self.name and self.start <= offset <= offset + length <= self.end

    def view(self, offset: int, length: int) -> memoryview:
        """These bytes, which are here."""
        place = self.head - self.before + offset - self.start
        return self.memory.data[place : place + length]

    def clear(self) -> None:
        """Hold nothing."""
        self.name, self.start, self.end, self.before = "", 0, 0, 0

    def keep(self, kept: memoryview) -> int:
        """Have these bytes where what is read begins; how many they are."""
        self.memory[self.head : self.head + len(kept)] = kept  # NumPy sees to it where they overlap
        return len(kept)

    def put_before(self, kept: memoryview) -> None:
        """Have these bytes before the first."""
        self.memory[self.head - len(kept) : self.head] = kept
        self.start, self.before = self.start - len(kept), len(kept)


def make_window(room: int) -> Window:
    """A window on nothing, for up to `room` bytes from any offset."""
    head = min(HEAD, page_up(room))
    return Window(aligned(head + page_up(room) + 2 * PAGE), head)


@dataclass(frozen=True, slots=True)
class _Coming:
    """A window that is being filled."""

    window: Window
    stop: int
    """Up to where, at least."""
    job: Future[int]


class Ahead:
    """A few windows that are filled one after the other, by a thread of its own, while another one is used."""

    def __init__(self, room: int, depth: int) -> None:
        """`depth` is how many windows of `room` bytes there are beside the one in use."""
        self.room, self.depth = room, depth
        self.free: list[Window] = []
        """Those that were filled and used."""
        self._coming: deque[_Coming] = deque()
        self._pool: ThreadPoolExecutor | None = None

    @property
    def busy(self) -> bool:
        """Whether something was begun that wasn't taken or dropped."""
        return bool(self._coming)

    @property
    def full(self) -> bool:
        """Whether no more can be begun now."""
        return len(self._coming) == self.depth

    def begin(self, name: str, start: int, stop: int, load: Callable[[memoryview], int]) -> None:
        """Have `load` fill a window's room from the page `start`; it returns the end of what it read."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "reshard-ahead")
        window = self.free.pop() if self.free else make_window(self.room)
        window.clear()
        window.name, window.start = name, start
        self._coming.append(_Coming(window, stop, self._pool.submit(load, window.room)))

    def offers(self, here: Window, name: str, offset: int, length: int) -> bool:
        """Whether these bytes come next, but for what the window `here` has of them."""
        if not self._coming:
            return False
        window, stop = self._coming[0].window, self._coming[0].stop
        kept = window.start - offset
        return (
            window.name == name
            and offset + length <= stop
            and (kept <= 0 or (kept <= window.head and here.holds(name, offset, kept)))
        )

    def take(self, here: Window, offset: int, length: int) -> Window | None:
        """The window with these bytes, which it offers. None where they couldn't be read."""
        coming = self._coming.popleft()
        window = coming.window
        try:
            window.end = coming.job.result()
        except OSError:
            window.end = window.start
        if window.end < offset + length:
            self.free.append(window)
            return None  # who reads it again meets the fault again
        kept = window.start - offset
        if kept > 0:
            window.put_before(here.view(offset, kept))
        return window

    def passed(self, name: str, offset: int) -> bool:
        """Whether what comes next lies before this byte."""
        return bool(self._coming) and self._coming[0].window.name == name and self._coming[0].stop <= offset

    def reads(self, name: str, start: int, stop: int) -> bool:
        """Whether what comes next begins in these bytes."""
        window = self._coming[0].window
        return window.name == name and page_down(start) <= window.start < stop

    def settle(self) -> None:
        """Wait until nothing is being read."""
        for coming in self._coming:
            coming.job.exception()

    def drop(self) -> None:
        """Wait, and take nothing of it."""
        self.settle()
        while self._coming:
            self.free.append(self._coming.pop().window)

    def close(self) -> None:
        """End the thread."""
        self.drop()
        if self._pool is not None:
            self._pool.shutdown()
