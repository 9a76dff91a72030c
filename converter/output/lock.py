"""A lock on an output folder that a crash leaves harmless: the system forgets it with the process that holds it."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path


class Lock:
    """A lock file; held from `take` to `release`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: int | None = None

    def take(self) -> bool:
        """Take the lock; False where another process holds it. Raises OSError."""
        while True:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            try:
                lock_file(handle)
                if os.stat(self.path).st_ino == os.fstat(handle).st_ino:
                    self._handle = handle
                    return True
            except BlockingIOError:
                os.close(handle)
                return False
            except FileNotFoundError:
                pass  # its holder removed it between the two calls
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)

    def release(self) -> None:
        """Give it back, if it is held."""
        if self._handle is not None:
            with suppress(OSError):  # the folder may be gone
                self.path.unlink(missing_ok=True)
            os.close(self._handle)
            self._handle = None


def lock_file(handle: int) -> None:
    """Lock what is open; BlockingIOError where another process has it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise  # some network file systems have no locks: there it is the user who sees to it
