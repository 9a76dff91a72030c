"""A stretch of a shard tensor being written and hashed: its bytes arrive in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from converter.streams.buffers import PAGE, Bytes, aligned, page_down, page_up
from converter.streams.hashing import TensorHash
from converter.streams.writing import Writer

Array = np.ndarray[Any, np.dtype[Any]]
HOT = 512 << 10
"""Bytes that are copied before they are hashed: as many as are then still in the nearest cache of the core."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a stretch of a tensor lies: bytes `start` to `stop` of the one that begins at `tensor` of the file."""

    name: str
    tensor: int
    start: int
    stop: int


class Sink:
    """Gathers what arrives in aligned memory and hashes it, still in cache; when the memory is full it is written.

    Memory that is filled more than once is two halves: one is filled while the other one is written.
    """

    __slots__ = (
        "_filled", "_hash", "_hashed", "_job", "_left", "_moved", "_name", "_other", "_place", "_room", "_writer",
    )  # fmt: skip

    def __init__(self, writer: Writer, place: Place, room: Bytes, moved: Callable[[int], None]) -> None:
        """`room` begins at a page and is whole pages; it must be left alone until the writer has finished.

        `moved` counts bytes.
        """
        half = page_down(len(room) // 2) if len(room) < place.stop - place.start else 0
        self._writer, self._name, self._place = writer, place.name, place.tensor + place.start
        self._room = room[: len(room) - half]
        self._other = room[len(room) - half :] if half else None
        self._filled = self._hashed = 0
        """Bytes in the room, and how many of them the digest has."""
        self._left = place.stop - place.start
        """Bytes that aren't on their way to the disk."""
        self._job: Future[None] | None = None
        """The write of the half that isn't being filled."""
        self._moved = moved
        self._hash = TensorHash(place.start)

    @property
    def seen(self) -> int:
        """Bytes taken so far."""
        return self._hash.seen + self._filled - self._hashed

    def take(self, piece: Array) -> None:
        """Take the next elements, in row-major order; the array may be reused after the call."""
        while piece.nbytes > (free := min(HOT, len(self._room) - self._filled)):
            rows = free // piece[0].nbytes
            if rows:
                self._copy(piece[:rows])
                piece = piece[rows:]
            else:
                self.take(piece[0])
                piece = piece[1:]
        self._copy(piece)

    def zeros(self, count: int) -> None:
        """Take `count` zero bytes: declared padding."""
        while count > 0:
            step = min(count, len(self._room) - self._filled)
            self._room[self._filled : self._filled + step] = 0
            self._advance(step)
            count -= step

    def _copy(self, piece: Array) -> None:
        if piece.nbytes:
            room = self._room[self._filled : self._filled + piece.nbytes]
            np.copyto(room.view(piece.dtype).reshape(piece.shape), piece)
            self._advance(piece.nbytes)

    def _advance(self, count: int) -> None:
        self._filled += count
        if self._filled == len(self._room):
            self._flush()
        elif self._filled - self._hashed >= HOT:
            self._digest()

    def _digest(self) -> None:
        """Hash what came since the last time."""
        self._hash.update(self._room.data[self._hashed : self._filled])
        self._hashed = self._filled

    def _flush(self) -> None:
        if not self._filled:
            return
        self._digest()
        data = self._room.data[: self._filled]
        before = self._job
        self._left -= len(data)
        if self._left:
            self._job = self._writer.later(self._name, self._place, data)
        else:
            self._writer.gather(self._name, self._place, data)
        self._moved(self._filled)
        self._place += self._filled
        self._filled = self._hashed = 0
        if not self._left:
            return  # the memory isn't needed again
        if self._other is None:
            before = self._job
        else:
            self._room, self._other = self._other, self._room
        if before is not None:
            before.result()

    def finish(self) -> bytes:
        """Have what is left written; the digests of the stretch's chunks, 16 bytes each, at least one."""
        self._flush()
        return self._hash.chunks()


class Staging:
    """The memory that the sinks of one worker share."""

    def __init__(self, size: int) -> None:
        self._room = aligned(size)

    def shares(self, sizes: Sequence[int]) -> list[Bytes]:
        """Memory for sinks that will take so many bytes: whole pages, no more than they need, else equal parts."""
        counts = [PAGE] * len(sizes)
        left = len(self._room)
        for done, number in enumerate(sorted(range(len(sizes)), key=lambda number: sizes[number])):
            fair = page_down(left // (len(sizes) - done))
            counts[number] = max(PAGE, min(page_up(sizes[number]), fair))
            left -= counts[number]
        if sum(counts) > len(self._room):
            self._room = aligned(sum(counts))
        ends = list(accumulate(counts, initial=0))
        return [self._room[start:stop] for start, stop in pairwise(ends)]
