"""File systems that take direct I/O, and those that don't, as a program meets them."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from converter.streams import handles

MODES = ["direct", "none", "refused when opened", "refused when used"]


@contextmanager
def file_system(mode: str) -> Iterator[None]:
    """The system's calls, as file systems without direct I/O answer them."""
    with pytest.MonkeyPatch.context() as patch:
        real: dict[str, Any] = {name: getattr(os, name) for name in ("open", "preadv", "pwrite")}

        def opened(path: Any, flags: int, *rest: Any) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "no")
            return int(real["open"](path, flags, *rest))

        def used(name: str) -> Any:
            def call(handle: int, *rest: Any) -> int:
                if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT:
                    raise OSError(errno.EINVAL, "no")
                return int(real[name](handle, *rest))

            return call

        if mode == "none":
            patch.setattr(handles, "DIRECT", 0)
        elif mode == "refused when opened":
            patch.setattr(os, "open", opened)
        elif mode == "refused when used":
            for name in ("preadv", "pwrite"):
                patch.setattr(os, name, used(name))
        yield
