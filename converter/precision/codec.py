"""Decoding and encoding of stretches of a matrix in any storage format: numbers and scales as stored <-> float32.

A coding is made of two choices, the type of the numbers and that of the scales; what is known of a format beside them
(block, packing) is data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from converter.precision.packing import pack_nibbles, pack_words, unpack_nibbles, unpack_words
from converter.precision.rounding import (
    E2M1,
    E2M1_MOST,
    E2M1_VALUES,
    E4M3,
    E4M3_MOST,
    E4M3_NAN,
    E4M3_VALUES,
    narrowed,
    to_whole,
    widened,
)
from converter.precision.scales import choose, unusable
from shard_plans.errors import PlanError

Array = np.ndarray[Any, np.dtype[Any]]
Parts = Mapping[str, Array]
"""values, and where there are scales scale and global_scale: unsigned integers of the stored items' size."""
PLAIN = {"BF16": 2, "F16": 2, "F32": 4}
"""Types of plain values and their bytes."""
NUMBERS = {"F8_E4M3": ("e4m3", 1), "U8": ("e2m1", 2), "I32": ("int4", 8), "I8": ("int8", 1)}
"""Types of quantised values: the numbers in them, and how many are in one."""
MOST = {"e4m3": E4M3_MOST, "e2m1": E2M1_MOST, "int4": 7.0, "int8": 127.0}
"""The largest number of a type that encoding makes."""
F32_MOST = np.float32(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class Coding:
    """How a matrix [rows, columns] is stored."""

    values: str
    """safetensors' word for the values' type."""
    scale: str | None = None
    """The same for the scales; None where the values are plain."""
    block: tuple[int, int] = (1, 1)
    """Rows and columns that share a scale; partial ones at the end."""
    tensor_scale: bool = False
    """One more float32 for the whole matrix, by which the scales are divided (NVFP4)."""

    def __post_init__(self) -> None:
        if self.values not in (PLAIN if self.scale is None else NUMBERS):
            raise PlanError(f"values stored as {self.values} can't be converted; leave this group as stored")

    @property
    def numbers(self) -> str:
        """e4m3, e2m1, int4, int8, or plain."""
        return "plain" if self.scale is None else NUMBERS[self.values][0]

    @property
    def pack(self) -> int:
        """Numbers in one stored element."""
        return 1 if self.scale is None else NUMBERS[self.values][1]

    @property
    def powers(self) -> bool:
        """Whether all scales are powers of two."""
        return self.scale in ("F8_E8M0", "U8")

    def decode(self, parts: Parts, columns: int) -> Array:
        """float32 [rows, columns]: number times scale, rounded to float32; the rows begin with a block."""
        if self.scale is None:
            return widened(parts["values"], self.values)
        scale = self.factors(parts)
        x = self._unpack(parts["values"])
        if x.shape[-1] != columns:
            raise PlanError(f"{x.shape[-1]} columns are stored where {columns} are expected")
        for part, factor in blocks(x, scale, self.block):
            part *= factor
        return x

    def factors(self, parts: Parts) -> Array:
        """What numbers are multiplied by, float32, one a block."""
        scale = widened(parts["scale"], self.scale or "F32")
        return scale / widened(parts["global_scale"], "F32") if self.tensor_scale else scale

    def _unpack(self, values: Array) -> Array:
        if self.numbers == "e4m3":
            return E4M3_VALUES.take(values)
        if self.numbers == "e2m1":
            return E2M1_VALUES.take(unpack_nibbles(values))
        if self.numbers == "int4":
            codes = unpack_words(values).astype(np.float32)
            codes -= 8  # stored plus 8
            return codes
        return values.view(np.int8).astype(np.float32)

    def encode(self, x: Array, whole: Array | None = None, powers: bool = False) -> dict[str, Array]:
        """The parts of float32 x [rows, columns], which begins with a block.

        `whole` is the matrix's own scale where there is one (`scales.of_matrix`); with `powers` scales are powers of
        two even where their type can hold others. A NaN stays one: where the numbers have none, its block's scale
        becomes it, and with it the block. Infinities become the block's largest number; plain types keep them.
        """
        if self.scale is None:
            return {"values": narrowed(x, self.values)}
        odd = None if np.isfinite(x).all() else ~np.isfinite(x)
        sizes = np.abs(x) if odd is None else np.where(odd, np.float32(0), np.abs(x))
        nan = None if odd is None else np.isnan(x)
        if nan is not None:
            x = np.where(nan, np.float32(0), np.clip(x, -F32_MOST, F32_MOST))
        top = np.zeros(grid(x.shape, self.block), np.float32)
        for part, place in blocks(sizes, top, self.block):
            place[...] = part.max(axis=over(self.block), keepdims=True)
        scale = choose(top, MOST[self.numbers], self.scale, powers, whole)
        if nan is not None and self.numbers != "e4m3":
            for part, place in blocks(nan, scale, self.block):
                place[part.any(axis=over(self.block), keepdims=True)] = unusable(self.scale)
        made = {"scale": scale} if whole is None else {"scale": scale, "global_scale": whole.view(np.uint32)}
        with np.errstate(over="ignore"):  # quotients beyond float32 saturate
            made["values"] = self._pack(self._rounded(x, self.factors(made)), nan)
        return made

    def _rounded(self, x: Array, factors: Array) -> Array:
        """The codes of the numbers nearest to x / factor, one uint8 each."""
        codes = np.empty(x.shape, np.uint8)
        usable = np.where((factors > 0) & np.isfinite(factors), factors, np.float32(np.inf))  # x / inf is 0
        places = zip(blocks(x, usable, self.block), blocks(codes, usable, self.block), strict=True)
        for (part, factor), (place, _) in places:
            if self.numbers == "e4m3":
                place[...] = E4M3.nearest(part, factor)
            elif self.numbers == "e2m1":
                place[...] = E2M1.nearest(part, factor)
            else:
                place[...] = to_whole(part, factor, int(MOST[self.numbers])).view(np.uint8)
        return codes

    def _pack(self, codes: Array, nan: Array | None) -> Array:
        if self.numbers == "e4m3" and nan is not None:
            codes[nan] = E4M3_NAN
        if self.numbers == "e2m1":
            return pack_nibbles(codes)
        if self.numbers == "int4":
            codes += 8  # wraps: -7 is 249, plus 8 is 1
            return pack_words(codes)
        return codes


def grid(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """Blocks along rows and columns."""
    return -(-shape[-2] // block[0]), -(-shape[-1] // block[1])


def blocks(x: Array, scale: Array, block: tuple[int, int]) -> Any:
    """Views of x [rows, columns] with views of the scales that belong to them, shaped so that they broadcast.

    Views are [rows, blocks, columns of a block], whole rows of single-row blocks all at once; [rows, 1, columns] where
    the last block is partial.
    """
    rows, columns = x.shape
    tall, wide = block
    whole = columns // wide
    step = rows if tall == 1 else tall
    for number, first in enumerate(range(0, rows, step)):
        part = x[first : first + step]
        line = scale[:, :] if tall == 1 else scale[number : number + 1]
        if whole:
            yield part[:, : whole * wide].reshape(len(part), whole, wide), line[:, :whole, None]
        if columns % wide:
            yield part[:, None, whole * wide :], line[:, whole:, None]


def over(block: tuple[int, int]) -> tuple[int, ...]:
    """The axes of the views of `blocks` along which numbers share a scale."""
    return (2,) if block[0] == 1 else (0, 2)
