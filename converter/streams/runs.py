"""Work dealt to threads in long runs, so that each goes on behind what it has just read."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(slots=True)
class _Run:
    """Items from `next` to `stop`."""

    next: int
    stop: int


class Runs(Iterator[Item], Generic[Item]):
    """Items in order, from another place for each thread that asks; one that is through takes half of what is left.

    Calls must not overlap: `run_all` sees to that.
    """

    def __init__(self, items: Sequence[Item], weights: Sequence[int], workers: int) -> None:
        """`weights` say how much work each item is."""
        self._items = items
        self._ends = list(accumulate(weights, initial=0))
        self._runs: dict[int, _Run] = {}
        borders = [self._place(self._ends[-1] * n // workers) for n in range(workers)] + [len(items)]
        self._waiting = [_Run(a, b) for a, b in pairwise(borders) if a < b][::-1]

    def _place(self, weight: int) -> int:
        """The first item with at least so much work before it."""
        low, high = 0, len(self._items)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self._ends[middle] < weight else (low, middle)
        return low

    def __next__(self) -> Item:
        """The next item of the calling thread."""
        mine = self._runs.get(threading.get_ident())
        if mine is None or mine.next >= mine.stop:
            mine = self._runs[threading.get_ident()] = self._another()
        mine.next += 1
        return self._items[mine.next - 1]

    def _another(self) -> _Run:
        """A run that no thread has yet, or the second half of the longest one."""
        if self._waiting:
            return self._waiting.pop()
        longest = max(self._runs.values(), key=lambda run: self._ends[run.stop] - self._ends[run.next], default=None)
        if longest is None or longest.next >= longest.stop:
            raise StopIteration
        middle = self._place((self._ends[longest.next] + self._ends[longest.stop]) // 2)
        middle = min(max(middle, longest.next), longest.stop - 1)
        taken = _Run(middle, longest.stop)
        longest.stop = middle
        return taken
