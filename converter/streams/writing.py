"""Writing byte ranges of files that exist already."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from typing import Any

from converter.streams.buffers import whole_pages
from converter.streams.handles import REFUSALS, Handles
from shard_plans.errors import OutputError

SYNC_FILE_RANGE_WRITE, SYNC_FILE_RANGE_ALL = 2, 7
EARLY = 256 << 10
"""Bytes of a write from which on the system is asked to begin with it at once, instead of when memory is full."""
SHORT = 64 << 10
"""Bytes below which a piece waits for its neighbours: each write through the page cache holds up direct ones."""
_libc: Any = ctypes.CDLL(None, use_errno=True)
_early: Any = getattr(_libc, "sync_file_range", None)


class Writer(Handles):
    """Writes ranges of existing files of one folder, for one thread."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, os.O_WRONLY | os.O_NOFOLLOW)
        self.bytes_written = 0
        self._behind: dict[str, tuple[int, int]] = {}
        """The last large range of each file that was written through the page cache."""
        self._pool: ThreadPoolExecutor | None = None
        self._jobs: list[Future[None]] = []
        self._short: list[tuple[str, int, memoryview]] = []
        """Pieces that wait for their neighbours: file, offset, bytes."""

    def write(self, name: str, offset: int, data: memoryview, aligned: bool = False) -> None:
        """Write all of `data` at `offset` of the file `name`; `aligned` says that the memory begins at a page."""
        try:
            large = aligned and len(data) >= EARLY and whole_pages(offset, len(data))
            if not (large and self._direct(name, offset, data)):
                handle, done = self.get(name), 0
                while done < len(data):
                    done += os.pwrite(handle, data[done:], offset + done)
                if len(data) >= EARLY:
                    self._hurry(name, handle, offset, len(data))
        except OSError as error:
            raise write_fault(self.folder / name, error) from error
        self.bytes_written += len(data)

    def later(self, name: str, offset: int, data: memoryview) -> Future[None]:
        """The same in a thread of its own, one after the other, while what follows is made; `data` begins at a page.

        The memory must be left alone until the write is done. From then on `write` is for that thread alone.
        """
        return self._submit(name, offset, data, True)

    def gather(self, name: str, offset: int, data: memoryview) -> None:
        """The same for the last piece of a stretch; a short one is written with those that it lies beside."""
        if len(data) < SHORT:
            self._short.append((name, offset, data))
        else:
            self._submit(name, offset, data, True)

    def _submit(self, name: str, offset: int, data: memoryview, aligned: bool) -> Future[None]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "reshard-behind")
        self._jobs = [job for job in self._jobs if not job.done() or job.exception()]
        self._jobs.append(self._pool.submit(self.write, name, offset, data, aligned))
        return self._jobs[-1]

    def finish(self) -> None:
        """Wait until everything is written. Raises OutputError."""
        short, self._short = self._short, []
        for name, offset, data in _joined(short):
            self._submit(name, offset, data, False)
        while self._jobs:
            self._jobs.pop(0).result()

    def close(self) -> None:
        """Wait, and close every file."""
        if self._pool is not None:
            self._pool.shutdown()
        super().close()

    def _direct(self, name: str, offset: int, data: memoryview) -> bool:
        """Write past the page cache; False where the file system can't."""
        done = 0
        handle = self.direct(name)
        try:
            while handle is not None and done < len(data):
                done += os.pwrite(handle, data[done:], offset + done)
        except OSError as error:
            if error.errno not in REFUSALS:
                raise
            self.refused(name)
            return False
        return handle is not None

    def _hurry(self, name: str, handle: int, offset: int, length: int) -> None:
        """Begin to write the range to the disk; drop the pages of the one before it, which is there by now."""
        if _early is None:
            return
        _early(handle, ctypes.c_int64(offset), ctypes.c_int64(length), SYNC_FILE_RANGE_WRITE)
        before = self._behind.get(name)
        self._behind[name] = offset, length
        if before is not None:
            _early(handle, ctypes.c_int64(before[0]), ctypes.c_int64(before[1]), SYNC_FILE_RANGE_ALL)
            os.posix_fadvise(handle, *before, os.POSIX_FADV_DONTNEED)


def _joined(pieces: list[tuple[str, int, memoryview]]) -> Iterator[tuple[str, int, memoryview]]:
    """Copies of the pieces, those that lie beside one another as one."""
    data = bytearray()
    listed = sorted(pieces, key=lambda piece: piece[:2])
    for (name, offset, piece), after in zip_longest(listed, listed[1:]):
        data += piece
        end = offset + len(piece)
        if after is None or after[:2] != (name, end):
            yield name, end - len(data), memoryview(data)
            data = bytearray()


def begin_writing(handle: int) -> None:
    """Ask the system to begin to write what it holds of the open file; it says nothing of faults, an fsync does."""
    if _early is not None:
        _early(handle, ctypes.c_int64(0), ctypes.c_int64(0), SYNC_FILE_RANGE_WRITE)


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
