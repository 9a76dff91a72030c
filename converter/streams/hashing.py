"""xxh3-128 of tensors, by chunks of 4 MiB, and of whole small files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import xxhash

from shard_plans.checkpoints.regular import open_regular
from shard_plans.documents.digests import CHUNK, canonical_digest, canonical_json

__all__ = ["CHUNK", "Digest", "TensorHash", "canonical_digest", "canonical_json", "file_digest", "hash_bytes"]

READ = 1 << 20


@dataclass(frozen=True, slots=True)
class Digest:
    """The digest of one tensor."""

    xxh3: str
    """In hex: of the data, or, where they are longer than one chunk, of the chunks' digests."""
    chunks: bytes
    """16 bytes for each chunk; empty where the data are not longer than one."""


class TensorHash:
    """Digest of a tensor whose bytes arrive in order, in pieces of any size."""

    __slots__ = ("_chunks", "_room", "_state", "seen")

    def __init__(self, place: int = 0) -> None:
        """`place` is where the bytes begin in their tensor: chunks are counted from there."""
        self._state = xxhash.xxh3_128()
        self._room = CHUNK - place % CHUNK
        self._chunks = bytearray()
        self.seen = 0
        """Bytes so far."""

    def update(self, data: memoryview) -> None:
        """Take the next bytes."""
        self.seen += len(data)
        while len(data) > self._room:
            self._state.update(data[: self._room])
            data = data[self._room :]
            self._chunks += self._state.digest()
            self._state.reset()
            self._room = CHUNK
        self._state.update(data)
        self._room -= len(data)

    def finish(self) -> Digest:
        """The digest of everything taken."""
        return whole_digest(self.chunks())

    def chunks(self) -> bytes:
        """The digests of all chunks, 16 bytes each; one where nothing was taken."""
        return bytes(self._chunks) + self._state.digest()


def whole_digest(chunks: bytes) -> Digest:
    """The digest of a tensor from those of its chunks, 16 bytes each."""
    return Digest(chunks.hex(), b"") if len(chunks) == 16 else Digest(xxhash.xxh3_128_hexdigest(chunks), chunks)


def hash_bytes(data: bytes | bytearray | memoryview) -> str:
    """xxh3-128 in hex."""
    return str(xxhash.xxh3_128_hexdigest(data))


def file_digest(path: Path) -> tuple[int, str]:
    """Size and xxh3-128 of a whole file; for headers and documents, not for weights. Raises OSError."""
    state, size = xxhash.xxh3_128(), 0
    with open(open_regular(path), "rb") as file:
        while data := file.read(READ):
            state.update(data)
            size += len(data)
    return size, state.hexdigest()
