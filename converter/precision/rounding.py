"""Rounding float32 to the nearest number of a smaller type, ties to even: the codes, as unsigned integers.

Finite values beyond the largest number saturate to it. Sources: IEEE 754 (binary16), Intel's bfloat16 paper, OCP 8-bit
Floating Point 1.0 (E4M3), OCP Microscaling Formats 1.0 (E2M1, E8M0).
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
BF16_MOST, F16_MOST = 3.3895313892515355e38, 65504.0
E4M3_MOST, E2M1_MOST = 448.0, 6.0
E4M3_NAN = 0x7F


def largest(x: Array) -> float:
    """The largest magnitude; NaN where there is one, 0 of nothing."""
    return float(np.abs(x).max(initial=0.0))


def to_bf16(x: Array) -> Array:
    """float32 -> bfloat16 as uint16; infinities stay, NaN becomes the quiet one of its sign."""
    u = x.view(np.uint32)
    r = u >> 16
    r &= 1
    r += 0x7FFF
    r += u
    codes = r.view(np.uint16)[..., 1::2].copy() if _little(x) else (r >> 16).astype(np.uint16)
    if not largest(x) <= BF16_MOST:
        odd = np.isnan(x)
        codes[odd] = (u[odd] >> 16).astype(np.uint16) & 0x8000 | 0x7FC0
        over = np.isfinite(x) & (np.abs(x) > BF16_MOST)
        codes[over] = (u[over] >> 16).astype(np.uint16) & 0x8000 | 0x7F7F
    return codes


def _little(x: Array) -> bool:
    return x.ndim > 0 and x.flags.c_contiguous and np.little_endian


def to_f16(x: Array) -> Array:
    """float32 -> IEEE half as uint16; infinities and NaN stay."""
    if not largest(x) <= F16_MOST:
        x = np.where(np.isinf(x), x, np.clip(x, -F16_MOST, F16_MOST))
    return x.astype(np.float16).view(np.uint16)


class Small:
    """A float type of a few bits, without infinities: `mantissa` bits behind the point, exponents from `least`."""

    def __init__(self, mantissa: int, least: int, most: float, sign: int) -> None:
        """`most` is the largest number, `sign` the bit of the sign."""
        self.mantissa, self.least, self.most, self.sign = mantissa, least, most, sign

    def nearest(self, x: Array, divisor: Array | None = None) -> Array:
        """The codes (uint8) of x / divisor, x float32 without NaN; saturated.

        A quotient is rounded once: where float32 would put it on a tie that it isn't on, the remainder decides.
        """
        quotient = x if divisor is None else x / divisor
        a = np.abs(quotient)
        np.minimum(a, np.float32(self.most), out=a)
        # adding 2^(e + 23 - mantissa) makes the processor round at the last bit that is kept
        power = a.view(np.uint32) >> 23
        np.maximum(power, self.least + 127, out=power)
        magic = power + (23 - self.mantissa)
        magic <<= 23
        m = magic.view(np.float32)
        f = a + m
        codes = f.view(np.uint32) - magic
        power -= self.least + 127
        power <<= self.mantissa
        codes += power
        if divisor is not None:
            f -= m
            f -= a
            np.abs(f, out=f)
            m *= np.float32(2.0**-24)
            self._untie(x, divisor, a, codes, f == m)
        signs = quotient.view(np.uint32) >> 31
        signs *= self.sign
        codes |= signs
        return codes.astype(np.uint8)

    def _untie(self, x: Array, divisor: Array, a: Array, codes: Array, ties: Array) -> None:
        """Correct quotients that only float32 rounded to a tie."""
        found = np.flatnonzero(ties)
        if not len(found):
            return
        where = np.unravel_index(found, ties.shape)
        tie, exact = a[where].astype(np.float64), np.abs(x[where].astype(np.float64))
        product = tie * np.broadcast_to(divisor, x.shape)[where].astype(np.float64)  # 24 + 5 bits: exact
        power = np.maximum(np.frexp(tie)[1] - 1, self.least)
        steps = np.floor(tie / np.exp2(power - self.mantissa)).astype(np.int64)
        below = steps + ((power - self.least) << self.mantissa)
        right = np.where(exact > product, below + 1, np.where(exact < product, below, codes[where]))
        codes[where] = right


E4M3 = Small(3, -6, E4M3_MOST, 0x80)
E2M1 = Small(1, 0, E2M1_MOST, 0x08)


def to_whole(x: Array, divisor: Array, most: int) -> Array:
    """The quotient x / divisor as whole numbers (int8) from -most to most, rounded once, ties to even; x has no NaN."""
    quotient = np.clip(x / divisor, -most - 1, most + 1)
    n = np.rint(quotient)
    ties = np.abs(quotient - n) == 0.5
    found = np.flatnonzero(ties)
    if len(found):
        where = np.unravel_index(found, ties.shape)
        q = quotient[where].astype(np.float64)
        product = q * np.broadcast_to(divisor, x.shape)[where].astype(np.float64)
        exact = x[where].astype(np.float64)
        n[where] = np.where(exact > product, np.ceil(q), np.where(exact < product, np.floor(q), n[where]))
    codes: Array = np.clip(n, -most, most).astype(np.int8)
    return codes


def _e4m3_table() -> Array:
    codes = np.arange(256)
    power, part = (codes >> 3) & 15, codes & 7
    value = np.where(power == 0, part * 2.0**-9, (1 + part / 8) * np.exp2(power - 7.0))
    value[(codes & 0x7F) == E4M3_NAN] = np.nan
    table: Array = np.where(codes & 0x80, -value, value).astype(np.float32)
    return table


def _e8m0_table() -> Array:
    powers = np.exp2(np.arange(256.0) - 127)
    powers[255] = np.nan
    table: Array = powers.astype(np.float32)
    return table


E4M3_VALUES = _e4m3_table()
"""Of each code; 0x7F and 0xFF are NaN, there are no infinities."""
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""Of each nibble."""
E8M0_VALUES = _e8m0_table()
"""Of each code c: 2^(c - 127); 255 is NaN."""


def widened(codes: Array, dtype: str) -> Array:
    """Codes of a type (safetensors' word; U8 is an exponent, as MXFP4 stores it) as the float32 that they mean."""
    if dtype == "BF16":
        return (codes.astype(np.uint32) << 16).view(np.float32)
    if dtype == "F16":
        return codes.view(np.float16).astype(np.float32)
    if dtype == "F32":
        return codes.view(np.float32)
    if dtype == "F8_E4M3":
        return E4M3_VALUES.take(codes)
    if dtype in ("F8_E8M0", "U8"):
        return E8M0_VALUES.take(codes)
    raise ValueError(f"{dtype} isn't a type of weights or scales")


def narrowed(x: Array, dtype: str) -> Array:
    """float32 -> codes of BF16, F16 or F32."""
    if dtype == "BF16":
        return to_bf16(np.ascontiguousarray(x))
    return to_f16(x) if dtype == "F16" else np.ascontiguousarray(x).view(np.uint32)
