"""Power loss: what a conversion asks of the disk is recorded, and every state that a disk may be left in is made.

A file's bytes are safe as of its last fsync; later ones may be there or not, sector by sector. A name is safe as of the
last fsync of its folder; of the changes since, any first few may be there.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SECTOR = 512


@dataclass
class Disk:
    """The disk below one folder, as the calls of a single thread leave it."""

    root: Path
    safe: dict[int, bytes] = field(default_factory=dict)
    """Inode -> bytes as of its last fsync."""
    names: dict[str, int] = field(default_factory=dict)
    """Path -> inode, as of the last fsync of the folder that it lies in."""
    changes: list[tuple[tuple[str, int | None], ...]] = field(default_factory=list)
    """Names given or taken since, in order; None: taken. A renaming is both, at once."""

    def path(self, where: object) -> str | None:
        """The path in the folder, of a path or descriptor; None where it is elsewhere."""
        name = os.readlink(f"/proc/self/fd/{where}") if isinstance(where, int) else os.fspath(where)  # type: ignore[call-overload]
        name = os.path.realpath(name)
        return os.path.relpath(name, self.root) if name.startswith(f"{self.root}{os.sep}") else None

    def synced(self, where: object) -> None:
        """A file or folder is on the disk."""
        full = Path(os.readlink(f"/proc/self/fd/{where}"))
        if full.is_dir():
            inside = str(full.relative_to(self.root)) if full.is_relative_to(self.root) else None
            kept = []
            for change in self.changes:
                if str(Path(change[0][0]).parent) == inside:
                    self._apply(self.names, change)
                else:
                    kept.append(change)
            self.changes = kept
        elif self.path(where) is not None:
            self.safe[full.stat().st_ino] = full.read_bytes()

    @staticmethod
    def _apply(names: dict[str, int], change: tuple[tuple[str, int | None], ...]) -> None:
        for name, inode in change:
            if inode is None:
                names.pop(name, None)
            else:
                names[name] = inode

    def after_loss(self, dice: random.Random) -> dict[str, bytes]:
        """What may be found when the power is back, by path."""
        names = dict(self.names)
        for change in self.changes[: dice.choice([0, len(self.changes), dice.randint(0, len(self.changes))])]:
            self._apply(names, change)
        now = {path.stat().st_ino: path for path in self.root.rglob("*") if path.is_file()}
        share = dice.choice([0.0, 1.0, 0.5])
        found = {}
        for name, inode in names.items():
            safe = self.safe.get(inode, b"")
            last = now[inode].read_bytes() if inode in now else safe
            safe = safe[: len(last)].ljust(len(last), b"\0")
            sectors = range(0, len(last), SECTOR)
            found[name] = b"".join((last if dice.random() < share else safe)[at : at + SECTOR] for at in sectors)
        return found


class AtOnce:
    """Does what is submitted in the calling thread: every run has the same moments then."""

    def __init__(self, *_: object) -> None:
        pass

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Do it now."""
        done: Future[None] = Future()
        try:
            work()
            done.set_result(None)
        except Exception as error:
            done.set_exception(error)
        return done

    def shutdown(self) -> None:
        """Nothing is left to do."""


def recorded(root: Path, patch: Any, moment: Callable[[Disk], object]) -> Iterator[Disk]:
    """While this generator stands, calls are recorded; `moment` is called before each that the disk may be lost at."""
    disk = Disk(root)
    real = {name: getattr(os, name) for name in ("open", "pwrite", "write", "fsync", "rename", "unlink")}

    def opened(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        there = os.path.lexists(path)
        handle: int = real["open"](path, flags, *rest, **options)
        name = disk.path(handle) if flags & os.O_CREAT and not there else None
        if name is not None:
            disk.changes.append(((name, os.fstat(handle).st_ino),))
        return handle

    def fsync(handle: int) -> None:
        moment(disk)
        real["fsync"](handle)
        disk.synced(handle)

    def rename(old: Any, new: Any, **options: Any) -> None:
        moment(disk)
        first, second = disk.path(old), disk.path(new)
        inode = os.stat(old).st_ino
        real["rename"](old, new, **options)
        if first and second:
            disk.changes.append(((second, inode), (first, None)))

    def unlink(path: Any, **options: Any) -> None:
        moment(disk)
        name = disk.path(path)
        real["unlink"](path, **options)
        if name:
            disk.changes.append(((name, None),))

    for name, call in (("open", opened), ("fsync", fsync), ("rename", rename), ("unlink", unlink)):
        patch.setattr(os, name, call)
    patch.setattr("converter.forward.move.ThreadPoolExecutor", AtOnce)
    yield disk
