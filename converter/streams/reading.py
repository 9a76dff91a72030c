"""Reading byte ranges of files into reused buffers, with a bounded number of files open."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from types import TracebackType

from shard_plans.errors import ReshardError

OPEN_FILES = 48
"""Files that one worker holds open; the usual limit is 1024 a process."""
DROP = 8 << 20
"""Pages of a read of this many bytes are handed back, so that a large checkpoint doesn't push out everything else."""


class Reader:
    """Reads ranges of the files of one folder, for one thread; a file is opened when first needed."""

    def __init__(self, folder: Path, error: type[ReshardError], sizes: dict[str, int] | None = None) -> None:
        self.folder = folder
        self.error = error
        self.sizes = sizes or {}
        """Sizes that files must have, by name; others are not looked at."""
        self.bytes_read = 0
        self._open: OrderedDict[str, int] = OrderedDict()

    def read(self, name: str, offset: int, view: memoryview) -> memoryview:
        """Fill `view` with the bytes from `offset` of the file `name`, and return it. Raises `error` where they end."""
        done, wanted = 0, len(view)
        try:
            handle = self._handle(name)
            while done < wanted:
                got = os.preadv(handle, [view[done:]], offset + done)
                if got == 0:
                    raise self.error(
                        f"{self.folder / name} ends at byte {offset + done}, but {offset + wanted} are needed: "
                        f"it is truncated, or was changed since it was opened"
                    )
                done += got
            if wanted >= DROP and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(handle, offset, wanted, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise self.error(f"{self.folder / name} can't be read at byte {offset + done}: {error.strerror}") from error
        self.bytes_read += wanted
        return view

    def _handle(self, name: str) -> int:
        handle = self._open.get(name)
        if handle is not None:
            self._open.move_to_end(name)
            return handle
        if len(self._open) >= OPEN_FILES:
            os.close(self._open.popitem(last=False)[1])
        handle = os.open(self.folder / name, os.O_RDONLY)
        self._open[name] = handle
        expected, size = self.sizes.get(name), os.fstat(handle).st_size
        if expected is not None and size != expected:
            raise self.error(f"{self.folder / name} has {size} bytes, not the {expected} it had or should have")
        return handle

    def close(self) -> None:
        """Close every file."""
        while self._open:
            os.close(self._open.popitem()[1])

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
