"""Host memory for layers, reserved as a number of bytes and used again once nothing looks into it."""

from __future__ import annotations

import weakref
from collections import deque
from threading import Condition

import torch
from torch import Tensor

from converter.streams.buffers import Bytes, aligned, page_up

WASTE = 1.25
"""How many times what is needed a piece may be that is used again."""


class Slabs:
    """Page-aligned pieces of memory, at most `limit` bytes of them together.

    A piece belongs to the tensor that `take` returns and to all views of it. It is used again when the last of them is
    gone, and not before: nothing that was handed out ever changes.
    """

    def __init__(self, limit: int, changed: Condition) -> None:
        """`changed` is notified when a piece came back; who calls `take` holds it."""
        self.limit = limit
        self.used = 0
        """Bytes of pieces that something looks into, as far as the last `take` knew."""
        self._changed = changed
        self._free: list[Bytes] = []
        self._gone: deque[Bytes] = deque()
        """Pieces that came back since: from any thread, at any moment, the collector's too."""

    def take(self, nbytes: int, beyond: bool = False) -> Tensor | None:
        """Memory [nbytes] uint8 that begins at a page, its content undefined; None while it doesn't fit.

        `beyond`: it is needed even if more than the limit is then taken.
        """
        while self._gone:
            self._free.append(self._gone.popleft())
            self.used -= len(self._free[-1])
        need = page_up(max(nbytes, 1))
        if not beyond and self.used + need > self.limit:
            return None
        most = min(WASTE * need, need if beyond else self.limit - self.used)
        found = min((piece for piece in self._free if need <= len(piece) <= most), key=len, default=None)
        if found is None:
            self._make_room(need)
            found = aligned(need)
        else:
            self._free = [piece for piece in self._free if piece is not found]
        self.used += len(found)
        whole = found[:nbytes]  # an object of its own, which the tensor holds: when it goes, so did every view
        weakref.finalize(whole, self._back, found).atexit = False
        return torch.from_numpy(whole)

    def close(self) -> None:
        """Give free pieces back to the system, and others when they come back."""
        self.limit = 0
        self._free.clear()
        self._gone.clear()

    def _make_room(self, need: int) -> None:
        """Give free pieces back to the system, the oldest first, until `need` bytes fit beside the others."""
        while self._free and self.used + sum(map(len, self._free)) + need > self.limit:
            del self._free[0]

    def _back(self, piece: Bytes) -> None:
        if self.limit:
            self._gone.append(piece)
        with self._changed:
            self._changed.notify_all()
