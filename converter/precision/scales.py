"""Choosing scales: from the largest magnitude of each block, as codes of the type that scales are stored in.

Rules. Scales of any value: largest / most, so that the largest number lands on the type's largest. Powers of two: the
smallest that keeps every E4M3 number in range; for E2M1 the exponent of the largest, less 2 (OCP Microscaling 1.0, 6.3:
values between 6 and 8 saturate). NVFP4: E4M3 scales of largest / 6, all of them times the matrix's own scale. A block
of zeros gets the scale 1, or the smallest code.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from converter.precision.rounding import E2M1_MOST, E4M3, E4M3_MOST, narrowed, widened

Array = np.ndarray[Any, np.dtype[Any]]
UNUSABLE = {"F32": 0x7FC00000, "BF16": 0x7FC0, "F16": 0x7E00, "F8_E8M0": 255, "U8": 255, "F8_E4M3": 0x7F}
LEAST = {"F32": 2.0**-126, "BF16": 2.0**-126, "F16": 2.0**-14}
"""Smallest normal numbers: no scale is smaller."""


def choose(top: Array, most: float, dtype: str, powers: bool, whole: Array | None) -> Array:
    """Codes of the scales for blocks whose largest magnitudes are `top` (float32, finite)."""
    if whole is not None:
        with np.errstate(over="ignore"):  # saturates
            return E4M3.nearest(top / np.float32(E2M1_MOST) * whole)
    if dtype in ("F8_E8M0", "U8"):
        if most == E2M1_MOST:
            exponents: Array = np.maximum(np.ascontiguousarray(top).view(np.uint32) >> 23, 2) - 2
            return exponents.astype(np.uint8)
        return (np.clip(_power(top, most), -127, 127) + 127).astype(np.uint8)
    scale = np.exp2(np.clip(_power(top, most), -126, 127)) if powers else top / np.float32(most)
    scale = np.where(top > 0, np.maximum(scale, LEAST[dtype]), 1).astype(np.float32)
    return narrowed(scale, dtype)


def _power(top: Array, most: float) -> Array:
    """The exponent of the smallest power of two that isn't below top / most."""
    part, power = np.frexp(top.astype(np.float64) / most)  # so exact that powers of two are seen
    return np.where(top > 0, power - (part == 0.5), -127)


def of_matrix(top: float) -> Array:
    """NVFP4's scale of a whole matrix whose largest magnitude is `top`: float32 [1], a divisor of the others."""
    with np.errstate(over="ignore", divide="ignore"):
        found = np.float32(E4M3_MOST * E2M1_MOST) / np.float32(top)
    return np.array([min(found, np.finfo(np.float32).max) if top else 1], np.float32)


def unusable(dtype: str) -> int:
    """The code of NaN."""
    return UNUSABLE[dtype]


def widen_to(scale: Array, dtype: str, wider: str) -> Array:
    """Scales of a type as codes of one that holds all of its values."""
    return narrowed(widened(scale, dtype), wider)
