"""How many numbers a stored matrix has when it is computed with: they are read one at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

HEAD_ROWS = 16384
"""Rows of embedding and head that are computed with at a time (runtime/blocks/vocabulary.py)."""
OUTSIDE = ("embed", "head")
PACKED = {"I32": 8, "U8": 2, "I8": 2, "F4": 2}
"""Numbers of 4 bits in an element of a quantised tensor."""


def numbers(role: str, dtype: str, shape: Sequence[int], format: str | None) -> int:
    """Of one matrix of a tensor `shape`, whose last two extents are a matrix's, the last three of MXFP4 in blocks."""
    if role in OUTSIDE:
        return math.prod(shape[1:]) * min(shape[0], HEAD_ROWS)
    each = PACKED.get(dtype, 1) if format is not None and "4" in format else 1
    return math.prod(shape[-3 if format == "mxfp4_blocks" else -2 :]) * each


def largest(found: Iterable[tuple[str, str, Sequence[int], str | None]]) -> int:
    """Numbers of the largest matrix among tensors, given as `numbers` takes them."""
    return max((numbers(*each) for each in found), default=0)
