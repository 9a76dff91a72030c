"""Text files for people and tools: written whole or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from shard_plans.errors import OutputError


def write_whole(path: Path, text: str, what: str = "report") -> None:
    """Write `text` to `path`, in the place of what is there; OutputError, which calls it `what`, where it can't."""
    partial = path.parent / f"{path.name}.partial"
    try:
        partial.unlink(missing_ok=True)
        with partial.open("x", encoding="utf-8") as file:  # a new file: a link that waits there isn't followed
            file.write(text)
        os.replace(partial, path)
    except (OSError, ValueError) as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        reason = error.strerror if isinstance(error, OSError) else error
        raise OutputError(f"{what} {path} can't be written: {reason}") from error
