"""Text files for people and tools: written whole or not at all, in the place of files alone."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from shard_plans.errors import OutputError


def file_to_replace(path: Path, what: str) -> Path:
    """The file that `path` names, links followed; OutputError where a folder, a device or the like lies there."""
    try:
        with suppress(FileNotFoundError):  # also through a link: it is made where the link leads
            if not stat.S_ISREG(path.stat().st_mode):
                raise OutputError(f"{what} {path} can't be written: what lies there isn't a file; give another name")
        return Path(os.path.realpath(path))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise OutputError(f"{what} {path} can't be written: {reason}") from error


def write_whole(path: Path, text: str, what: str = "report") -> None:
    """Write `text` to `path`, in the place of the file there; OutputError, which calls it `what`, where it can't."""
    target = file_to_replace(path, what)
    partial = target.parent / f"{target.name}.partial"
    try:
        partial.unlink(missing_ok=True)
        with partial.open("x", encoding="utf-8") as file:  # a new file: a link that waits there isn't followed
            file.write(text)
        os.replace(partial, target)
    except (OSError, ValueError) as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        reason = error.strerror if isinstance(error, OSError) else error
        raise OutputError(f"{what} {path} can't be written: {reason}") from error
