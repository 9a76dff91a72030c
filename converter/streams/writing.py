"""Writing byte ranges of new files, and shard tensors whose bytes arrive in order."""

from __future__ import annotations

import ctypes
import errno
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from converter.streams.hashing import Digest, TensorHash
from converter.streams.reading import OPEN_FILES
from shard_plans.errors import OutputError

Array = np.ndarray[Any, np.dtype[Any]]
BUFFER = 8 << 20
"""Bytes of a worker's buffer: no block of a tensor is larger."""
SMALL = 64 << 10
"""Pieces below this are gathered before they are written."""
PENDING = 256 << 10
"""Bytes gathered before they are written; less where very many tensors are written at once."""
SYNC_FILE_RANGE_WRITE = 2
EARLY = 256 << 10
"""Bytes of a write from which on the system is asked to begin with it at once, instead of when memory is full."""
_libc: Any = ctypes.CDLL(None, use_errno=True)
_early: Any = getattr(_libc, "sync_file_range", None)


class Writer:
    """Writes ranges of existing files of one folder, for one thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bytes_written = 0
        self.scratch: Array = np.empty(BUFFER, np.uint8)
        """Where pieces that aren't contiguous are put together."""
        self._open: OrderedDict[str, int] = OrderedDict()

    def write(self, name: str, offset: int, data: memoryview) -> None:
        """Write all of `data` at `offset` of the file `name`."""
        done = 0
        try:
            handle = self._handle(name)
            while done < len(data):
                done += os.pwrite(handle, data[done:], offset + done)
            if len(data) >= EARLY and _early is not None:
                _early(handle, ctypes.c_int64(offset), ctypes.c_int64(len(data)), SYNC_FILE_RANGE_WRITE)
        except OSError as error:
            raise write_fault(self.folder / name, error) from error
        self.bytes_written += len(data)

    def _handle(self, name: str) -> int:
        handle = self._open.get(name)
        if handle is not None:
            self._open.move_to_end(name)
            return handle
        if len(self._open) >= OPEN_FILES:
            os.close(self._open.popitem(last=False)[1])
        self._open[name] = os.open(self.folder / name, os.O_WRONLY | os.O_NOFOLLOW)
        return self._open[name]

    def close(self) -> None:
        """Close every file."""
        while self._open:
            os.close(self._open.popitem()[1])

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Sink:
    """One shard tensor being written and hashed: its bytes arrive in order."""

    __slots__ = ("_hash", "_limit", "_moved", "_name", "_pending", "_start", "_writer")

    def __init__(self, writer: Writer, name: str, start: int, limit: int, moved: Callable[[int], None]) -> None:
        """`start` is the tensor's offset in the file, `limit` how many bytes may be gathered, `moved` counts bytes."""
        self._writer, self._name, self._start = writer, name, start
        self._limit = limit
        self._moved = moved
        self._hash = TensorHash()
        self._pending = bytearray()

    @property
    def seen(self) -> int:
        """Bytes taken so far."""
        return self._hash.seen

    def take(self, piece: Array) -> None:
        """Take the next elements, in row-major order; the array may be reused after the call."""
        if not piece.flags.c_contiguous:
            if piece.nbytes <= BUFFER:
                room = self._writer.scratch[: piece.nbytes].view(piece.dtype).reshape(piece.shape)
                np.copyto(room, piece)
                piece = room
            else:
                piece = np.ascontiguousarray(piece)
        self._put(piece.reshape(-1).view(np.uint8).data)

    def zeros(self, count: int) -> None:
        """Take `count` zero bytes: declared padding."""
        while count > 0:
            step = min(count, BUFFER)
            room = self._writer.scratch[:step]
            room[:] = 0
            self._put(room.data)
            count -= step

    def _put(self, data: memoryview) -> None:
        position = self._start + self._hash.seen
        self._hash.update(data)
        if len(data) < min(SMALL, self._limit):
            self._pending += data
            if len(self._pending) >= self._limit:
                self._flush(position + len(data))
            return
        self._flush(position)
        self._writer.write(self._name, position, data)
        self._moved(len(data))

    def _flush(self, end: int) -> None:
        """Write what was gathered; it ends at the offset `end` of the file."""
        if self._pending:
            self._writer.write(self._name, end - len(self._pending), memoryview(self._pending).toreadonly())
            self._moved(len(self._pending))
            self._pending = bytearray()

    def finish(self) -> Digest:
        """Write what is left and return the digest."""
        self._flush(self._start + self._hash.seen)
        return self._hash.finish()


def write_fault(path: Path, error: OSError) -> OutputError:
    """The error for a write that the system refused."""
    return OutputError(f"{path} can't be written: {error.strerror}; make room or choose another folder, and run again")


def allocate(handle: int, size: int) -> None:
    """Give the open file `size` bytes of disk, so that a full disk shows before anything is written. Raises OSError."""
    call = getattr(_libc, "fallocate64", None) or getattr(_libc, "fallocate", None)
    if call is not None and size:
        if call(handle, 0, ctypes.c_int64(0), ctypes.c_int64(size)) == 0:
            return
        number = ctypes.get_errno()
        # not posix_fallocate: where the file system can't, that one writes every block
        if number not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise OSError(number, os.strerror(number))
    os.ftruncate(handle, size)
