"""Opening files of folders that come from strangers: nothing but regular files, and never waiting for a writer."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def open_regular(path: Path) -> int:
    """A descriptor to read the regular file at `path`; OSError for anything else (a pipe, a device, a folder)."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file")
    return handle


def read_regular(path: Path, limit: int) -> bytes:
    """All bytes of the regular file at `path`; OSError where it is something else, or has more than `limit` bytes."""
    with open(open_regular(path), "rb") as file:
        raw = file.read(limit + 1)
    if len(raw) > limit:
        raise OSError(errno.EFBIG, f"it has more than {limit} bytes")
    return raw
