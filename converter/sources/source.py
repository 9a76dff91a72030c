"""What a conversion reads from: stored tensors by the file and offset at which the checkpoint has them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shard_plans.checkpoints.checkpoint import Checkpoint, SourceFile
from shard_plans.documents.manifest import Origin
from shard_plans.families.binding import Binding
from shard_plans.placement.arrangement import Arrangement
from shard_plans.placement.shards import Cut, Placement


class StoredReader(Protocol):
    """Reads the stored tensors of a checkpoint, for one thread."""

    @property
    def bytes_read(self) -> int:
        """Of files, so far."""

    @property
    def unproven(self) -> int:
        """Bytes that must still be read until everything that was fetched is known to be undamaged."""

    def prove(self) -> None:
        """Read them. Raises CheckFailed where something that was fetched is damaged."""

    def read(self, name: str, offset: int, view: memoryview) -> memoryview:
        """Fill `view` with the bytes from `offset` of the checkpoint's file `name`, and return it."""

    def fetch(self, name: str, offset: int, length: int) -> memoryview:
        """The same as a view into a buffer that the next call may fill again; at most `room` bytes."""

    def some(self, name: str, offset: int, length: int, unit: int = 1) -> memoryview:
        """The same, but of `length` bytes only as many whole units as are at hand, and at least one."""

    def expect(self, name: str, spans: Sequence[tuple[int, int]]) -> None:
        """Say that all bytes of these ascending spans of the file will be fetched, after those named before."""

    def passed(self, count: int) -> None:
        """Expect nothing more of the first `count` spans; what comes behind them is still read ahead."""

    def forget(self) -> None:
        """Expect nothing more, and hold nothing."""


class Need(Protocol):
    """What is to be read: cuts of a stored tensor, or of those of some experts."""

    @property
    def experts(self) -> tuple[int, ...] | None:
        """Their ids; None where the tensor isn't an expert's."""

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """One for each dimension."""

    @property
    def arranged(self) -> Arrangement | None:
        """What its dimensions are, where not the stored ones."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Bytes of a file that are copied as they are: a whole small file, or the JSON header of a large one."""

    path: Path
    start: int = 0
    length: int | None = None
    """Bytes; None: all."""
    digest: str | None = None
    """The xxh3-128 that they must have, where it is known."""


class Source(ABC):
    """A checkpoint's bytes, wherever they lie."""

    buffers: int
    """Buffers of `room` bytes that each of its readers takes."""
    sequential: bool
    """Whether a reader should go on where it was, because a part of what it reads there is for proof."""
    via: tuple[Origin, ...] = ()
    """The outputs through which the bytes came."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    @abstractmethod
    def reader(self, room: int) -> AbstractContextManager[StoredReader]:
        """A reader for one thread that fetches up to `room` bytes at a time."""

    @abstractmethod
    def seals(self) -> Mapping[str, str]:
        """For each file that is read, words that change when it does; what is read from now on must match them."""

    @abstractmethod
    def unchanged(self) -> None:
        """Raise SourceChanged where a file isn't what it was when `seals` was called."""

    @abstractmethod
    def prepare(self, binding: Binding, placement: Placement) -> None:
        """Raise unless what the placement draws on is there, and what it takes for granted is so."""

    @abstractmethod
    def require(self, needs: Iterable[tuple[str, Need]]) -> None:
        """Raise unless these are there, each under the name or pattern of stored tensors."""

    @abstractmethod
    def carried(self, name: str) -> Stretch:
        """The small file `name` of the checkpoint."""

    @abstractmethod
    def header(self, file: SourceFile) -> Stretch:
        """The JSON header of a file of the checkpoint, without its length word."""


def blocks(stretch: Stretch, size: int) -> Iterator[bytes]:
    """The bytes of a stretch in blocks of at most `size`. Raises OSError; EOFError where the file ends early."""
    with open(stretch.path, "rb") as file:
        file.seek(stretch.start)
        left = stretch.path.stat().st_size - stretch.start if stretch.length is None else stretch.length
        while left > 0:
            data = file.read(min(size, left))
            if not data:
                raise EOFError(left)
            left -= len(data)
            yield data
