"""A band of rows from one coding to another, with the error that this makes; done in tiles that stay in cache."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from converter.precision.codec import Coding, Parts, blocks
from converter.precision.errors import Errors, compare, of_tables
from converter.precision.rounding import E4M3_VALUES, largest, narrowed, widened
from converter.precision.scales import widen_to

Array = np.ndarray[Any, np.dtype[Any]]
TILE = 1 << 17
"""Numbers of a tile, about."""
WIDER = {("BF16", "F32"), ("F16", "F32"), ("F8_E8M0", "F32")}
"""Types of scales of which the second holds every value of the first."""


def recode(
    source: Coding, target: Coding, parts: Parts, columns: int, whole: Array | None = None, powers: bool = False
) -> tuple[dict[str, Array], Errors]:
    """The parts of `target` for a band whose stored parts are `parts`, and its errors.

    The band is whole rows of the matrix, begins with a block of both codings, and ends with one or with the matrix.
    `whole` is the matrix's own scale where the target has one; with `powers` the numbers come of scales that are
    powers of two, and get such. The same band gives the same result, to the bit.
    """
    errors = Errors()
    if source.scale is not None and _keeps_numbers(source, target):
        for x, _, _ in _decoded(source, target, parts, columns):
            errors.add(compare(x, x))
        scale = widen_to(parts["scale"], source.scale, target.scale or "")
        return {**parts, "scale": np.ascontiguousarray(scale)}, errors
    made: dict[str, list[Array]] = {}
    powers = powers or source.powers
    for x, first, last in _decoded(source, target, parts, columns):
        if x is None:
            tile, found = _by_table(source, target, _tile(source, parts, first, last), last - first)
        else:
            tile = target.encode(x, whole, powers)
            found = compare(x, target.decode(tile, last - first))
        for kind, part in tile.items():
            made.setdefault(kind, []).append(part)
        errors.add(found)
    joined = {kind: found[0] if len(found) == 1 else np.concatenate(found, axis=-1) for kind, found in made.items()}
    if "global_scale" in joined:
        joined["global_scale"] = joined["global_scale"][:1]
    return joined, errors


def top(source: Coding, parts: Parts, columns: int) -> float:
    """The largest finite magnitude in a band, for `scales.of_matrix`."""
    found = 0.0
    for x, _, _ in _decoded(source, source, parts, columns):
        most = largest(x)
        found = max(found, most if math.isfinite(most) else largest(x[np.isfinite(x)]))
    return found


def band_rows(source: Coding, target: Coding, rows: int, columns: int) -> int:
    """Rows of a band: whole blocks of both codings, and about a few tiles; a fact of the matrix alone."""
    least = math.lcm(source.block[0], target.block[0])
    return min(rows, least * max(1, 4 * TILE // max(1, least * columns)))


def _keeps_numbers(source: Coding, target: Coding) -> bool:
    """Whether the codings differ in nothing but the type of scales, and the target's holds those of the source."""
    return (source.scale, target.scale) in WIDER and source == replace(target, scale=source.scale)


def _decoded(source: Coding, target: Coding, parts: Parts, columns: int) -> Iterator[tuple[Any, int, int]]:
    """Tiles as float32 (None where tables are faster) with their first and last column."""
    by_table = source.numbers == "e4m3" and target.scale is None
    step = math.lcm(source.block[1], target.block[1], source.pack, target.pack)
    rows = len(parts["values"])
    step = columns if step >= columns else step * max(1, TILE // max(1, rows * step))
    for first in range(0, columns, step):
        last = min(first + step, columns)
        if by_table:
            yield None, first, last
        else:
            yield source.decode(_tile(source, parts, first, last), last - first), first, last


def _tile(source: Coding, parts: Parts, first: int, last: int) -> Parts:
    """The parts of some columns, which begin with a block."""
    tile = {"values": parts["values"][:, first // source.pack : -(-last // source.pack)]}
    if source.scale is not None:
        tile["scale"] = parts["scale"][:, first // source.block[1] : -(-last // source.block[1])]
    if source.tensor_scale:
        tile["global_scale"] = parts["global_scale"]
    return tile


def _by_table(source: Coding, target: Coding, tile: Parts, columns: int) -> tuple[dict[str, Array], Errors]:
    """E4M3 to a plain type: each block has 256 possible values, so each is converted once and then looked up."""
    factors = source.factors(tile)
    with np.errstate(over="ignore", invalid="ignore"):  # codes that needn't occur
        x = E4M3_VALUES * factors.reshape(-1, 1)
    codes = narrowed(x, target.values)
    index = tile["values"].astype(np.intp)
    offsets = (np.arange(factors.size, dtype=np.intp) * 256).reshape(factors.shape)
    for part, offset in blocks(index, offsets, source.block):
        part += offset
    counts = np.bincount(index.ravel(), minlength=codes.size).reshape(codes.shape)
    values = codes.ravel().take(index)
    return {"values": values}, of_tables(x, widened(codes, target.values), counts)
