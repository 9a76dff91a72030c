"""Threads that load batches of tensors, each batch into one piece of memory, in the order in which they were given."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from converter.streams.workers import short_turns
from runtime.comm.devices import SideStream
from runtime.loading.fetch import Fetcher
from runtime.loading.ports import DevicePort, HostPort, empty_on
from runtime.loading.slabs import Slabs
from runtime.loading.stretches import Arranged, Stretch


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load."""

    device: torch.device
    check: bool = True
    """Compare digests."""
    resident: int = 3
    """Sections in memory at a time: the one that is computed, and those that are loaded meanwhile."""
    budget: int = 0
    """Bytes of sections that stay in memory from one pass to the next; the first ones in order stay."""
    threads: int = 4
    only: Collection[int] | None = None
    """The layers that are loaded; None: all."""
    tower: bool = False
    """Load the vision tower, and nothing else; otherwise everything but the tower."""
    verify: bool = False
    """Hash once more what arrived on the device."""
    ring: bool = False
    """Read through pinned buffers on a CPU too, as other devices need it."""


@dataclass(slots=True, eq=False)
class Batch:
    """What is loaded together."""

    arranged: Arranged
    turns: list[int]
    """Turns of the forward pass that wait for it."""
    beyond: bool
    """A rank waits for it already: it is needed even if more memory than was reserved is then taken."""
    left: int = 0
    """Stretches that haven't arrived."""
    memory: Tensor | None = None


class Batches:
    """Loads batches. Methods but `close` are called with `state` held, and so are the callbacks."""

    def __init__(
        self, out: Path, sizes: Mapping[str, int], options: LoadOptions, limit: int, state: threading.Condition,
        arrived: Callable[[Batch, Tensor], None],
    ) -> None:  # fmt: skip
        """`sizes` of the files of `out`; `limit`: bytes of memory; `arrived` is given each batch and its memory."""
        self._out, self._sizes, self._options = out, dict(sizes), options
        self._state, self._tell = state, arrived
        self._on_host = options.device.type == "cpu" and not options.ring
        self._slabs = Slabs(limit, state)
        if options.device.type != "cpu":
            empty_on(options.device, limit)  # its allocator keeps what it once was given
        self._waiting: deque[Batch] = deque()
        """Those that have no memory yet."""
        self._queue: deque[tuple[Batch, Stretch]] = deque()
        self._busy, self._since = 0, 0.0
        self.closed = False
        self.error: BaseException | None = None
        self.bytes_read = 0
        self.seconds = 0.0
        """How long at least one thread was loading."""
        self._turns = ExitStack()
        self._turns.enter_context(short_turns())
        self._threads = [
            threading.Thread(target=self._work, name=f"loader-{number}", daemon=True)
            for number in range(max(1, options.threads))
        ]
        for thread in self._threads:
            thread.start()

    def add(self, batch: Batch) -> None:
        """Load it, behind those added before."""
        batch.left = len(batch.arranged.stretches)
        self._waiting.append(batch)
        self._state.notify_all()

    @property
    def stuck(self) -> Batch | None:
        """The batch for which there is no memory, where nothing is loaded meanwhile."""
        return self._waiting[0] if self._waiting and not self._busy and not self._queue else None

    @property
    def used(self) -> int:
        """Bytes of host memory that something looks into."""
        return self._slabs.used

    def _work(self) -> None:
        """One thread: read, check, copy to the device, hand over."""
        device, options = self._options.device, self._options
        try:
            port = HostPort() if self._on_host else DevicePort(SideStream(device))
            fetcher = Fetcher(self._out, self._sizes, port, options.check, str(device) if options.verify else None)
            try:
                while self._one(fetcher):
                    pass  # what was loaded isn't kept by this thread while it waits
            finally:
                fetcher.close()
        except BaseException as fault:
            with self._state:
                self.error = self.error or fault
                self.closed = True
                self._state.notify_all()

    def _one(self, fetcher: Fetcher) -> bool:
        """Load the next stretch, once there is memory for it; False when closed."""
        with self._state:
            while not self.closed and not self._queue and not self._begin():
                self._state.wait()
            if self.closed:
                return False
            batch, stretch = self._queue.popleft()
            memory = batch.memory
            assert memory is not None
            self._since = time.monotonic() if not self._busy else self._since
            self._busy += 1
        fetcher.fetch(stretch, memory)
        with self._state:
            self.bytes_read += sum(chunk.stop - chunk.start for chunk in stretch.chunks)
            self._busy -= 1
            if not self._busy:
                self.seconds += time.monotonic() - self._since
            batch.left -= 1
            if batch.left == 0:
                batch.memory = None
                self._tell(batch, memory)
            self._state.notify_all()
        return True

    def _begin(self) -> bool:
        """Give the next batch memory and queue its stretches; whether it could be done."""
        if not self._waiting:
            return False
        batch = self._waiting[0]
        if self._on_host:
            batch.memory = self._slabs.take(batch.arranged.nbytes, batch.beyond)
        else:
            batch.memory = empty_on(self._options.device, batch.arranged.nbytes)
        if batch.memory is None:
            return False
        self._waiting.popleft()
        self._queue.extend((batch, stretch) for stretch in batch.arranged.stretches)
        return True

    def close(self) -> None:
        """Stop the threads; what wasn't loaded is forgotten."""
        with self._state:
            self.closed = True
            self._state.notify_all()
        for thread in self._threads:
            thread.join()
        self._turns.close()
        self._slabs.close()
        self._queue.clear()
        self._waiting.clear()
