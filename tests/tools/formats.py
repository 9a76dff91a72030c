"""Storage formats read and written by tables of code points, in float64; written from the published specifications.

OCP 8-bit Floating Point 1.0 (E4M3), OCP Microscaling Formats 1.0 (E2M1, E8M0), compressed-tensors' pack-quantized and
nvfp4-pack-quantized layouts. Nothing of the converter is used here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
# fmt: off
E4M3 = [  # of the codes 0 to 126, exponent by exponent; 127 is NaN, and bit 7 the sign
    0.0, 0.001953125, 0.00390625, 0.005859375, 0.0078125, 0.009765625, 0.01171875, 0.013671875,
    0.015625, 0.017578125, 0.01953125, 0.021484375, 0.0234375, 0.025390625, 0.02734375, 0.029296875,
    0.03125, 0.03515625, 0.0390625, 0.04296875, 0.046875, 0.05078125, 0.0546875, 0.05859375,
    0.0625, 0.0703125, 0.078125, 0.0859375, 0.09375, 0.1015625, 0.109375, 0.1171875,
    0.125, 0.140625, 0.15625, 0.171875, 0.1875, 0.203125, 0.21875, 0.234375,
    0.25, 0.28125, 0.3125, 0.34375, 0.375, 0.40625, 0.4375, 0.46875,
    0.5, 0.5625, 0.625, 0.6875, 0.75, 0.8125, 0.875, 0.9375,
    1.0, 1.125, 1.25, 1.375, 1.5, 1.625, 1.75, 1.875,
    2.0, 2.25, 2.5, 2.75, 3.0, 3.25, 3.5, 3.75,
    4.0, 4.5, 5.0, 5.5, 6.0, 6.5, 7.0, 7.5,
    8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0,
    16.0, 18.0, 20.0, 22.0, 24.0, 26.0, 28.0, 30.0,
    32.0, 36.0, 40.0, 44.0, 48.0, 52.0, 56.0, 60.0,
    64.0, 72.0, 80.0, 88.0, 96.0, 104.0, 112.0, 120.0,
    128.0, 144.0, 160.0, 176.0, 192.0, 208.0, 224.0, 240.0,
    256.0, 288.0, 320.0, 352.0, 384.0, 416.0, 448.0,
]
# fmt: on


def e4m3(codes: Array) -> Array:
    """E4M3 codes (uint8) as float64."""
    half = np.array([*E4M3, np.nan])
    return np.concatenate([half, -half])[codes]


def e2m1(nibbles: Array) -> Array:
    """E2M1 codes as float64."""
    half = np.array(E2M1)
    return np.concatenate([half, -half])[nibbles]


def power(codes: Array) -> Array:
    """E8M0 codes as float64; 255 is NaN."""
    return np.where(codes == 255, np.nan, np.ldexp(1.0, codes.astype(np.int64) - 127))


def number(codes: Array, dtype: str) -> Array:
    """Unsigned integers of a safetensors type as float64."""
    if dtype == "BF16":
        return (codes.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype in ("F16", "F32"):
        return codes.view({"F16": np.float16, "F32": np.float32}[dtype]).astype(np.float64)
    return e4m3(codes) if dtype == "F8_E4M3" else power(codes)


def nibbles(values: Array) -> Array:
    """Bytes or words -> the 4-bit numbers in them, the lowest bits first."""
    count = 2 * values.itemsize
    shifts = 4 * np.arange(count)
    return ((values[..., None].astype(np.int64) >> shifts) & 15).reshape(*values.shape[:-1], -1)


def spread(scale: Array, block: tuple[int, int], shape: tuple[int, int]) -> Array:
    """One scale an element."""
    rows, columns = np.arange(shape[0]) // block[0], np.arange(shape[1]) // block[1]
    return scale[rows][:, columns]


def decode(parts: Mapping[str, Array], dtypes: Mapping[str, str], block: tuple[int, int] | None) -> Array:
    """A stored matrix [rows, columns] as float64; where there are scales the product is rounded to float32 first."""
    values, dtype = parts["values"], dtypes["values"]
    if "scale" not in parts:
        return number(values, dtype)
    assert block is not None
    if dtype == "F8_E4M3":
        numbers = e4m3(values)
    elif dtype == "U8":
        numbers = e2m1(nibbles(values.reshape(len(values), -1)))
    elif dtype == "I32":
        numbers = nibbles(values).astype(np.float64) - 8
    else:
        numbers = values.view(np.int8).astype(np.float64)
    scale = number(parts["scale"], dtypes["scale"])
    if "global_scale" in parts:
        scale = (scale.astype(np.float32) / parts["global_scale"].view(np.float32)).astype(np.float64)
    with np.errstate(over="ignore"):
        return (numbers * spread(scale, block, numbers.shape)).astype(np.float32).astype(np.float64)


def nearest(x: Array, grid: list[float]) -> Array:
    """Position in the ascending grid of the number nearest to |x|; ties go to the even one, the rest to the end."""
    points = np.array(grid)
    middle = (points[1:] + points[:-1]) / 2
    below, above = np.searchsorted(middle, np.abs(x), "left"), np.searchsorted(middle, np.abs(x), "right")
    return np.where(below == above, below, np.where(below % 2 == 0, below, above))


GRIDS = {"F8_E4M3": E4M3, "U8": E2M1, "I32": [float(n) for n in range(8)], "I8": [float(n) for n in range(128)]}


def quantised(x: Array, scale: Array, dtype: str, block: tuple[int, int]) -> Array:
    """The numbers of the type nearest to x / scale, in float64, where `scale` is one a block."""
    wide = spread(scale, block, x.shape)
    grid = GRIDS[dtype]
    found: Array = np.copysign(np.array(grid)[nearest(x / wide, grid)], x)
    return found


def block_top(x: Array, block: tuple[int, int]) -> Array:
    """The largest magnitude of each block."""
    rows = np.maximum.reduceat(np.abs(x), np.arange(0, x.shape[0], block[0]), 0)
    return np.maximum.reduceat(rows, np.arange(0, x.shape[1], block[1]), 1)


def errors(source: Array, made: Array) -> tuple[float, float, float]:
    """Largest and mean relative error over finite non-zero elements, and the cosine."""
    kept = np.isfinite(source)
    x, y = source[kept], made[kept]
    some = x != 0
    relative = np.abs(y[some] - x[some]) / np.abs(x[some])
    norms = float(np.sqrt((x * x).sum() * (y * y).sum()))
    cosine = float((x * y).sum()) / norms if norms else float((x * x).sum() == (y * y).sum())
    return float(relative.max(initial=0.0)), float(relative.mean()) if some.any() else 0.0, cosine
