"""A few threads over a list of work, each with its own buffers, and a meter of how far they are."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

Item = TypeVar("Item")
Worker = TypeVar("Worker")
Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all, from any thread, never twice at a time."""
READERS = max(4, min(8, os.cpu_count() or 4))
"""Threads that read and hash where nothing is said: while one hashes the disk serves the others."""
INTERVAL = 0.1
"""Seconds between calls of a progress callback."""
TURN = 0.0002
"""Seconds that a thread may compute while others wait for their turn: a disk would wait too for the usual 0.005."""


@contextmanager
def short_turns() -> Iterator[None]:
    """Threads that compute in Python give way sooner, so that those that read and write needn't wait for them."""
    turn = sys.getswitchinterval()
    sys.setswitchinterval(min(turn, TURN))
    try:
        yield
    finally:
        sys.setswitchinterval(turn)


class Meter:
    """Adds up what the workers did and tells the progress callback now and then."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.done, self.total = 0, total
        self._progress = progress
        self.lock = threading.Lock()
        self._told = 0.0

    def add(self, count: int) -> None:
        """Count bytes; may be called from any thread."""
        with self.lock:
            self.done += count
            now = time.monotonic()
            if self._progress and (now - self._told >= INTERVAL or self.done == self.total):
                self._told = now
                self._progress(self.done, self.total)


def run_all(
    items: Iterable[Item],
    make_worker: Callable[[], AbstractContextManager[Worker]],
    work: Callable[[Worker, Item], None],
    workers: int,
) -> None:
    """Do `work` for every item on `workers` threads; each thread makes a worker of its own and closes it at the end.

    The first exception stops all of them, and is raised when they have stopped.
    """
    queue = iter(items)
    lock = threading.Lock()
    stop = threading.Event()
    faults: list[BaseException] = []

    def following() -> Iterator[Item]:
        while not stop.is_set():
            with lock:
                try:
                    item = next(queue)
                except StopIteration:
                    return
            yield item

    def main() -> None:
        try:
            with make_worker() as worker:
                for item in following():
                    work(worker, item)
        except BaseException as fault:
            faults.append(fault)
            stop.set()

    threads: list[threading.Thread] = []
    with short_turns():
        try:
            for number in range(max(1, workers)):
                thread = threading.Thread(target=main, name=f"reshard-{number}")
                thread.start()
                threads.append(thread)
            for thread in threads:
                thread.join()
        except BaseException:
            stop.set()
            for thread in threads:
                thread.join()
            raise
    if faults:
        raise faults[0]
