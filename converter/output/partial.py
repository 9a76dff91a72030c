"""Files under partial names: reserved, written, synced, and given their names only when they are whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from converter.streams.hashing import hash_bytes
from converter.streams.writing import allocate, begin_writing, write_fault
from shard_plans.errors import OutputError

PARTIAL = ".partial"
"""Ends the name of every file that isn't whole yet."""
TOGETHER = 128
"""Files that are synced at a time."""


def partial_path(folder: Path, name: str) -> Path:
    """Where `name` is written before it is whole."""
    return folder / (name + PARTIAL)


def check_space(folder: Path, needed: int) -> None:
    """Raise OutputError unless the disk of `folder` has `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OutputError(f"{folder} needs {needed} bytes, but the disk has {free} free; nothing was written")


def allocated(folder: Path, names: Iterable[str]) -> int:
    """Bytes of disk that the partial files of these names have already."""
    paths = [partial_path(folder, name) for name in names]
    return sum(path.stat().st_blocks * 512 for path in paths if path.is_file())


def reserve(folder: Path, name: str, size: int) -> None:
    """Make the partial file of `name`, `size` bytes long, with its space on the disk where that can be had."""
    path = partial_path(folder, name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = _create(path)
        try:
            allocate(handle, size)
        finally:
            os.close(handle)
    except OSError as error:
        free = shutil.disk_usage(folder).free
        raise OutputError(f"{path} needs {size} bytes, {free} are free: {error.strerror}") from error


def reserve_again(folder: Path, name: str, size: int) -> None:
    """The same where an interrupted conversion may have left the file: one of that size is kept."""
    path = partial_path(folder, name)
    try:
        if path.is_file() and not path.is_symlink() and path.stat().st_size == size:
            return
        path.unlink(missing_ok=True)
    except OSError as error:
        raise write_fault(path, error) from error
    reserve(folder, name, size)


def write_small(folder: Path, name: str, data: bytes) -> tuple[int, str]:
    """Write a whole small file under its partial name; returns its size and digest."""
    path = partial_path(folder, name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(_create(path), "wb") as file:
            file.write(data)
    except OSError as error:
        raise write_fault(path, error) from error
    return len(data), hash_bytes(data)


def write_through(spare: str, path: Path, data: bytes) -> None:
    """Write a small file whole under the name `spare` beside it, then give it its own; both are on the disk after it.

    Raises OSError.
    """
    written = path.parent / spare
    handle = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
    try:
        while data:
            data = data[os.write(handle, data) :]
        os.fsync(handle)
    finally:
        os.close(handle)
    written.rename(path)
    sync(path.parent)


def _create(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)


def publish(folder: Path, names: Iterable[str]) -> None:
    """Sync the partial files of these names, give them their names in this order, then sync their folders."""
    listed = list(names)
    try:
        sync_all([partial_path(folder, name) for name in listed])
        for name in listed:
            partial_path(folder, name).rename(folder / name)
        for parent in sorted({folder, *((folder / name).parent for name in listed)}):
            sync(parent)
    except OSError as error:
        raise write_fault(folder, error) from error


def sync(path: Path) -> None:
    """Wait until the file or folder at `path` is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_all(paths: Sequence[Path]) -> None:
    """Wait until these files are on the disk; writing is begun for many before the first of them is waited for."""
    for first in range(0, len(paths), TOGETHER):
        with ExitStack() as stack:
            handles = []
            for path in paths[first : first + TOGETHER]:
                handles.append(os.open(path, os.O_RDONLY))
                stack.callback(os.close, handles[-1])
                begin_writing(handles[-1])
            for handle in handles:
                os.fsync(handle)


def remove_empty(folder: Path) -> None:
    """Remove the folder if nothing is in it."""
    try:
        folder.rmdir()
    except OSError:
        return  # not there, or not empty: then it stays
