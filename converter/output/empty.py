"""A new or empty folder that is filled at one go, and not left half-filled where that fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from converter.output.lock import lock_file
from converter.output.partial import PARTIAL, remove_empty
from shard_plans.errors import OutputError


@contextmanager
def empty_folder(folder: Path) -> Iterator[None]:
    """Make the folder and keep it from other processes; what is unfinished goes where the block fails.

    Raises OutputError where something lies in it, or another process has it.
    """
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise OutputError(f"{folder} can't be written: {error.strerror}; choose another folder") from error
    try:
        _check_empty(folder, handle)
        try:
            yield
        except BaseException:
            _discard(folder, made)
            raise
    finally:
        os.close(handle)  # and with it the lock


def _check_empty(folder: Path, handle: int) -> None:
    try:
        lock_file(handle)
        if any(folder.iterdir()):
            raise OutputError(f"{folder} isn't empty; restore writes into a new or empty folder")
        if not os.access(folder, os.W_OK):
            raise OutputError(f"{folder} can't be written: no permission; choose another folder")
    except BlockingIOError as error:
        raise OutputError(f"another process is writing {folder}; wait, or choose another folder") from error
    except OSError as error:
        raise OutputError(f"{folder} can't be written: {error.strerror}; choose another folder") from error


def _discard(folder: Path, made: bool) -> None:
    for path in folder.glob(f"*{PARTIAL}"):
        path.unlink(missing_ok=True)
    if made:
        remove_empty(folder)
