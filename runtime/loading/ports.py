"""How what is read reaches the memory that layers are computed from: in place, or through a ring of pinned buffers."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from converter.streams.buffers import page_up
from runtime.comm.devices import SideStream

STEP = 8 << 20
"""Bytes of one read at most: hashed while some of it is still in the processor's cache."""
RING = 2
"""Buffers of a thread: one is copied to the device while the other is read into."""


class Port(Protocol):
    """Used by one thread for one piece of memory [bytes] at a time, step by step."""

    def room(self, memory: Tensor, place: int, size: int) -> memoryview:
        """Whole pages for the `size` bytes that go to `place` of the memory. Valid until the next call."""

    def send(self, memory: Tensor, place: int, size: int) -> None:
        """What was put into the room belongs there now."""

    def settle(self) -> None:
        """Wait until everything sent has arrived."""

    def back(self, memory: Tensor, place: int, size: int) -> memoryview:
        """What arrived at `place`, for the host to look at; `settle` was called. Valid until the next call."""


class HostPort:
    """The memory is the host's own: it is read into directly, and nothing is copied."""

    def room(self, memory: Tensor, place: int, size: int) -> memoryview:
        """The place itself."""
        return _view(memory[place : place + page_up(size)])

    def send(self, memory: Tensor, place: int, size: int) -> None:
        """It is there already."""

    def settle(self) -> None:
        """Nothing is under way."""

    def back(self, memory: Tensor, place: int, size: int) -> memoryview:
        """The place itself."""
        return _view(memory[place : place + size])


class DevicePort:
    """A ring of pinned buffers; a buffer is filled again only after its copy to the device is done."""

    def __init__(self, stream: SideStream) -> None:
        self._stream = stream
        self._buffers = [stream.pinned(STEP) for _ in range(RING)]
        self._events: list[Any] = [None] * RING
        self._next = 0

    def room(self, memory: Tensor, place: int, size: int) -> memoryview:
        """The next buffer, once what it held has arrived."""
        self._wait(self._next)
        return _view(self._buffers[self._next][: page_up(size)])

    def send(self, memory: Tensor, place: int, size: int) -> None:
        """Begin to copy the buffer."""
        target, source = memory[place : place + size], self._buffers[self._next][:size]
        self._events[self._next] = self._stream.copy(target, source)
        self._next = (self._next + 1) % RING

    def settle(self) -> None:
        """Wait for the copies of all buffers."""
        for number in range(RING):
            self._wait(number)

    def back(self, memory: Tensor, place: int, size: int) -> memoryview:
        """Copied from the device into a buffer."""
        buffer = self._buffers[self._next][:size]
        event = self._stream.copy(buffer, memory[place : place + size])
        self._stream.wait(event)
        return _view(buffer)

    def _wait(self, number: int) -> None:
        self._stream.wait(self._events[number])
        self._events[number] = None


def _view(flat: Tensor) -> memoryview:
    return memoryview(flat.numpy())  # type: ignore[arg-type]  # numpy < 2 has no typed buffer


def empty_on(device: torch.device, nbytes: int) -> Tensor:
    """Memory [nbytes] uint8 of the device's own allocator, which gives it to others when its last view is gone."""
    return torch.empty(nbytes, dtype=torch.uint8, device=device)
