"""Memory for reading and writing past the page cache: aligned, private, reused."""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Any

import numpy as np

HUGE = 2 << 20
PAGE = 4096
"""Places, lengths and memory of direct reads and writes are multiples of this."""
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def aligned(size: int) -> Bytes:
    """New zeroed memory of `size` bytes that begins at a page; given back when the last view of it goes."""
    # A plain mmap(-1) is a shared mapping, which is slower to fill.
    large = size >= HUGE and hasattr(mmap, "MADV_HUGEPAGE")
    whole = -(-size // HUGE) * HUGE + HUGE if large else max(size, PAGE)  # the last page is a large one too
    room = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory: Bytes = np.frombuffer(room, np.uint8)
    start = 0
    if large:
        with suppress(OSError):  # of many small pages a direct request would be cut into many small ones
            room.madvise(mmap.MADV_HUGEPAGE)
        start = -memory.ctypes.data % HUGE
    return memory[start : start + max(size, PAGE)]


def page_down(value: int) -> int:
    """The largest multiple of a page that isn't more than `value`."""
    return value & ~(PAGE - 1)


def page_up(value: int) -> int:
    """The smallest multiple of a page that isn't less than `value`."""
    return -(-value // PAGE) * PAGE


def whole_pages(*values: int) -> bool:
    """Whether all are multiples of a page."""
    return not any(value % PAGE for value in values)
