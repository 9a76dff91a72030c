"""Element types of safetensors files."""

from __future__ import annotations

import struct

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
"""Bits an element, by safetensors' word for the type."""


def element(dtype: str, value: float) -> bytes:
    """The bytes of one element of a float type that hold `value` exactly. Raises ValueError where it can't."""
    wide = struct.pack("<f", value)
    raw = {"F32": wide, "BF16": wide[2:], "F16": struct.pack("<e", value)}.get(dtype)
    exact = dtype != "BF16" or wide[:2] == b"\0\0"
    if raw is None or not exact or (dtype == "F16" and struct.unpack("<e", raw)[0] != value):
        raise ValueError(f"{dtype} doesn't hold {value}")
    return raw
