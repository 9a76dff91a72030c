"""What no input may do: take long, take much memory, or touch a file outside the folders that it was given."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CPU = 20.0
"""Seconds of computing for one case; a busy machine doesn't add to them."""
WALL = 240.0
"""Seconds for one case by the clock: only something that waits for ever takes as long."""
MEMORY = 256 << 20
"""Bytes that the peak of the resident memory may grow by."""
ADDRESSES = 3 << 30
"""Bytes of addresses beyond those at the start: past them an allocation fails before the machine suffers."""
CHANGES = {
    "os.rename": 2, "os.remove": 1, "os.rmdir": 1, "os.mkdir": 1, "os.link": 2, "os.symlink": 2, "os.truncate": 1,
    "os.chmod": 1, "os.chown": 1, "os.utime": 1, "os.setxattr": 1, "shutil.rmtree": 1,
}  # fmt: skip
"""Audit events that change what lies on a disk, and how many paths they name first."""
RELATIVE = ("os.remove", "os.rmdir")
"""Those that shutil.rmtree calls relative to a folder that it holds open."""
NEVER = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class", "socket.connect")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Fault(AssertionError):
    """Something that no input may bring about."""


class Guard:
    """Limits for this process, which is best one of its own: they can't be taken back."""

    def __init__(self, sandbox: Path, readable: tuple[str, ...]) -> None:
        """Writing is allowed below `sandbox`; reading also below `readable`."""
        self.sandbox = f"{os.path.realpath(sandbox)}{os.sep}"
        self.readable = (self.sandbox, *(f"{os.path.realpath(path)}{os.sep}" for path in readable))
        self.escapes: list[str] = []
        self.watching = False
        pages = int(Path("/proc/self/statm").read_text().split()[0]) if os.path.exists("/proc/self/statm") else 0
        limit = pages * os.sysconf("SC_PAGE_SIZE") + ADDRESSES
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
        self.peak = _peak()
        sys.addaudithook(self._heard)
        for number in (signal.SIGALRM, signal.SIGPROF):
            signal.signal(number, self._late)

    @contextmanager
    def case(self) -> Iterator[None]:
        """Watch one case. Raises Fault where it did what it must not."""
        self.escapes.clear()
        self.watching = True
        signal.setitimer(signal.ITIMER_PROF, CPU)
        signal.setitimer(signal.ITIMER_REAL, WALL)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            self.watching = False
            grown, self.peak = _peak() - self.peak, max(self.peak, _peak())
            if self.escapes:
                raise Fault(f"left its folder: {self.escapes[0]}")
            if grown > MEMORY:
                raise Fault(f"took {grown >> 20} MiB of memory")

    def _late(self, number: int, frame: Any) -> None:
        raise Fault("takes too long" if number == signal.SIGPROF else "waits for ever")

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.watching:
            return
        wrong = None
        if event == "open":
            path, _, flags = arguments
            if isinstance(path, (str, bytes, os.PathLike)):
                follow = not flags & (os.O_NOFOLLOW | os.O_EXCL)
                if flags & WRITES:
                    wrong = path if not self._real(path, follow).startswith(self.sandbox) else None
                else:
                    wrong = path if not self._real(path, follow).startswith(self.readable) else None
        elif event in CHANGES:
            folder = next((word for word in arguments[::-1] if type(word) is int and word >= 0), None)
            base = os.readlink(f"/proc/self/fd/{folder}") if folder and event in RELATIVE else ""
            for path in arguments[: CHANGES[event]]:
                path = os.path.join(base, os.fsdecode(path)) if isinstance(path, (str, bytes, os.PathLike)) else ""
                if path and not self._real(path, False).startswith(self.sandbox):
                    wrong = path
        elif event.startswith(NEVER):
            wrong = str(arguments)[:100]
        if wrong is not None:
            self.escapes.append(f"{event} {wrong!r}")
            raise PermissionError(f"{event} {wrong!r}")

    def _real(self, path: Any, follow: bool) -> str:
        """Where a path leads; with a mark that it is a folder's own name, too."""
        folder, name = os.path.split(os.path.abspath(os.fsdecode(path)))
        where = os.path.join(os.path.realpath(folder), name)
        where = os.path.realpath(where) if follow else where
        return where + os.sep if where + os.sep in self.readable else where


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
