"""Open files of one folder, a bounded number of them; direct ones bypass the page cache where that works."""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from pathlib import Path
from types import TracebackType
from typing import TypeVar

OPEN_FILES = 48
"""Files that one worker holds open; the usual limit is 1024 a process."""
DIRECT = getattr(os, "O_DIRECT", 0)
REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
"""What file systems say that can't do direct I/O, when a file is opened or at its first use."""
Own = TypeVar("Own", bound="Handles")


class Handles:
    """Files of one folder, opened when first needed, for one thread."""

    def __init__(self, folder: Path, flags: int) -> None:
        self.folder = folder
        self._flags = flags
        self._open: OrderedDict[tuple[str, bool], int] = OrderedDict()
        self._buffered: set[str] = set()

    def get(self, name: str, direct: bool = False) -> int:
        """A file descriptor of the file `name`. Raises OSError."""
        key = name, direct
        handle = self._open.get(key)
        if handle is not None:
            self._open.move_to_end(key)
            return handle
        if len(self._open) >= OPEN_FILES:
            self.settle()
            os.close(self._open.popitem(last=False)[1])
        flags = self._flags | getattr(os, "O_NONBLOCK", 0) | (DIRECT if direct else 0)  # a pipe isn't waited for
        try:
            handle = os.open(self.folder / name, flags)
        except OSError as error:
            if error.errno != errno.EMFILE or not self._open:
                raise
            self.let_go()  # very many workers: each makes do with less
            handle = os.open(self.folder / name, flags)
        self._open[key] = handle
        self.opened(name, handle)
        return handle

    def direct(self, name: str) -> int | None:
        """A file descriptor that bypasses the page cache; None where the file's file system has none."""
        if not DIRECT or name in self._buffered:
            return None
        try:
            return self.get(name, True)
        except OSError as error:
            if error.errno not in REFUSALS:
                raise
            self.refused(name)
            return None

    def refused(self, name: str) -> None:
        """Remember that direct I/O doesn't work for the file."""
        self._buffered.add(name)

    def opened(self, name: str, handle: int) -> None:
        """Look at a file that was just opened."""

    def settle(self) -> None:
        """Wait until no other thread uses a file: one will be closed."""

    def let_go(self) -> None:
        """Close every file; others may be opened after that."""
        self.settle()
        while self._open:
            os.close(self._open.popitem()[1])

    def close(self) -> None:
        """Close every file for good."""
        self.let_go()

    def __enter__(self: Own) -> Own:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
