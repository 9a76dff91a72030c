"""Memory for reading and writing past the page cache: aligned, private, reused."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

PAGE = 4096
"""Places, lengths and memory of direct reads and writes are multiples of this."""
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def aligned(size: int) -> Bytes:
    """New zeroed memory of at least `size` bytes that begins at a page; given back when the last view of it goes."""
    # A plain mmap(-1) is a shared mapping, which is slower to fill.
    room = mmap.mmap(-1, max(size, PAGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(room, np.uint8)


def page_down(value: int) -> int:
    """The largest multiple of a page that isn't more than `value`."""
    return value & ~(PAGE - 1)


def page_up(value: int) -> int:
    """The smallest multiple of a page that isn't less than `value`."""
    return -(-value // PAGE) * PAGE


def whole_pages(*values: int) -> bool:
    """Whether all are multiples of a page."""
    return not any(value % PAGE for value in values)
