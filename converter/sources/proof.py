"""Reading shard tensors so that nothing is taken over unhashed: each chunk's digest is compared as its bytes go by."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import xxhash

from converter.sources.held import HeldTensor
from converter.sources.windows import WindowReader
from converter.streams.reading import Stamp
from shard_plans.documents.digests import CHUNK
from shard_plans.errors import CheckFailed, ManifestError


@dataclass(slots=True)
class _Open:
    """A chunk of which some was read."""

    tensor: HeldTensor
    place: int
    """Up to where it was hashed, in bytes of the tensor."""
    stop: int
    """Where it ends."""
    state: Any = field(default_factory=xxhash.xxh3_128)


class ProvingReader(AbstractContextManager["ProvingReader"]):
    """Reads ranges of shard tensors, for one thread, in any order; those that ascend are read once.

    A chunk that is read from its first byte to its last is hashed on the way. What of it nobody asked for is read for
    its digest alone: what comes before at once, what comes behind when `prove` is called.
    """

    def __init__(
        self, out: Path, sizes: Mapping[str, int], stamps: Mapping[str, Stamp], room: int, proven: bytearray
    ) -> None:
        """`proven` has a byte for every chunk of the output, which is set when its digest was right."""
        self.out, self.room, self.proven = out, room, proven
        self._reader = WindowReader(out, ManifestError, sizes, stamps, room)
        self._open: dict[int, _Open] = {}

    @property
    def bytes_read(self) -> int:
        """Of shard files."""
        return self._reader.bytes_read

    @property
    def unproven(self) -> int:
        """Bytes that are left to read until the digests of all chunks read from are compared."""
        return sum(chunk.stop - chunk.place for number, chunk in self._open.items() if not self.proven[number])

    @property
    def piece(self) -> int:
        """Bytes to take at a time where many places are read in turn."""
        return min(self.room, self._reader.piece)

    def rest(self) -> None:
        """Say that other places will be read from now on."""
        self._reader.rest()

    def take(self, tensor: HeldTensor, start: int, length: int) -> memoryview:
        """`length` bytes, at most `room`, of a shard tensor from byte `start`: a view that the next call may change.

        Raises CheckFailed where a chunk that ends here doesn't have its digest, ManifestError where the file ends.
        """
        first = self._behind(tensor, start)
        while start + length - first > self.room:
            self._hash(tensor, first, self._fetch(tensor, first, min(self.room, start - first)))
            first = min(first + self.room, start)
        view = self._fetch(tensor, first, start + length - first)
        self._hash(tensor, first, view)
        return view[start - first :]

    def prove(self) -> None:
        """Read what is missing of the chunks that were read from. Raises CheckFailed."""
        for number, chunk in list(self._open.items()):
            while not self.proven[number]:
                length = min(self.room, chunk.stop - chunk.place)
                self._hash(chunk.tensor, chunk.place, self._fetch(chunk.tensor, chunk.place, length))
        self._open.clear()

    def _fetch(self, tensor: HeldTensor, start: int, length: int) -> memoryview:
        limit = start + length
        if not self.proven[tensor.first_chunk + (limit - 1) // CHUNK]:  # the rest of it must be read in any case
            limit = min(-(-limit // CHUNK) * CHUNK, tensor.nbytes)
        return self._reader.take(tensor, tensor.file, tensor.start + start, length, tensor.start + limit)

    def _behind(self, tensor: HeldTensor, start: int) -> int:
        """From where to read so that the chunk in which `start` lies is hashed without a gap."""
        number = tensor.first_chunk + start // CHUNK
        if self.proven[number]:
            return start
        chunk = self._open.get(number)
        return min(start, chunk.place if chunk is not None else start - start % CHUNK)

    def _hash(self, tensor: HeldTensor, start: int, view: memoryview) -> None:
        """Hash what is new of the bytes from `start`, and compare the digests of the chunks that are whole now."""
        end = start + len(view)
        for at in range(start - start % CHUNK, end, CHUNK):
            number = tensor.first_chunk + at // CHUNK
            if self.proven[number]:
                self._open.pop(number, None)
                continue
            chunk = self._open.get(number)
            if chunk is None:
                chunk = self._open[number] = _Open(tensor, at, min(at + CHUNK, tensor.nbytes))
            stop = min(end, chunk.stop)
            if stop > chunk.place:
                chunk.state.update(view[chunk.place - start : stop - start])
                chunk.place = stop
            if chunk.place == chunk.stop:
                self._compare(number, chunk)

    def _compare(self, number: int, chunk: _Open) -> None:
        tensor, index = chunk.tensor, number - chunk.tensor.first_chunk
        stated = tensor.digests[16 * index : 16 * index + 16]
        if chunk.state.digest() != stated:
            first = tensor.start + index * CHUNK
            raise CheckFailed(
                f"{self.out / tensor.file} is damaged, so nothing is made of it: {tensor.name}, chunk {index}, bytes "
                f"{first} to {tensor.start + chunk.stop} of the file: the digest is {chunk.state.hexdigest()}, the "
                f"manifest states {stated.hex()}; put back the file as it was, or start from the checkpoint"
            )
        self.proven[number] = 1
        del self._open[number]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.close()
