"""Several small numbers in one stored element, along the columns."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def unpack_nibbles(packed: Array) -> Array:
    """Bytes [.., n] -> nibbles [.., 2n] as uint8, the low half first."""
    out = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), np.uint8)
    np.bitwise_and(packed, 15, out=out[..., 0::2])
    np.right_shift(packed, 4, out=out[..., 1::2])
    return out


def pack_nibbles(codes: Array) -> Array:
    """Nibbles [.., 2n] -> bytes [.., n], the first in the low half."""
    high = codes[..., 1::2] << 4
    high |= codes[..., 0::2]
    return high


def unpack_words(packed: Array) -> Array:
    """32-bit words [.., n] -> nibbles [.., 8n] as uint8, the lowest bits first."""
    return unpack_nibbles(np.ascontiguousarray(packed).astype("<u4", copy=False).view(np.uint8))


def pack_words(codes: Array) -> Array:
    """Nibbles [.., 8n] -> 32-bit words [.., n] as uint32, the first in the lowest bits."""
    return pack_nibbles(codes).view("<u4").astype(np.uint32, copy=False)
