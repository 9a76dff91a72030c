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
        for tile, width in _tiles(source, target, parts, columns):
            x = source.decode(tile, width)
            errors.add(compare(x, x))
        scale = widen_to(parts["scale"], source.scale, target.scale or "")
        return {**parts, "scale": np.ascontiguousarray(scale)}, errors
    powers = powers or source.powers
    lines: list[dict[str, Array]] = []
    line: list[dict[str, Array]] = []
    done = 0
    for tile, width in _tiles(source, target, parts, columns):
        if source.numbers == "e4m3" and target.scale is None:
            made, found = _by_table(source, target, tile)
        else:
            x = source.decode(tile, width)
            made = target.encode(x, whole, powers)
            found = compare(x, target.decode(made, width))
        errors.add(found)
        line.append(made)
        done += width
        if done == columns:
            lines.append(_joined(line, -1))
            line, done = [], 0
    return _joined(lines, 0), errors


def _joined(parts: list[dict[str, Array]], axis: int) -> dict[str, Array]:
    """Tiles beside or below one another; they share the matrix's own scale."""
    if len(parts) == 1:
        return parts[0]
    return {
        kind: found if kind == "global_scale" else np.concatenate([part[kind] for part in parts], axis)
        for kind, found in parts[0].items()
    }


def top(source: Coding, parts: Parts, columns: int) -> float:
    """The largest finite magnitude in a band, for `scales.of_matrix`."""
    found = 0.0
    for tile, width in _tiles(source, source, parts, columns):
        x = source.decode(tile, width)
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


def _tiles(source: Coding, target: Coding, parts: Parts, columns: int) -> Iterator[tuple[Parts, int]]:
    """The band in tiles, from left to right and from top to bottom, with the columns of each."""
    rows = len(parts["values"])
    wide = math.lcm(source.block[1], target.block[1], source.pack, target.pack)
    wide = columns if wide >= columns else wide * max(1, TILE // max(1, min(rows, _tall(source, target)) * wide))
    tall = rows if rows * min(wide, columns) <= TILE else _height(source, target, min(wide, columns))
    for above in range(0, rows, tall):
        below = min(above + tall, rows)
        for left in range(0, columns, wide):
            right = min(left + wide, columns)
            yield _tile(source, parts, (above, below), (left, right)), right - left


def _tall(source: Coding, target: Coding) -> int:
    return math.lcm(source.block[0], target.block[0])


def _height(source: Coding, target: Coding, width: int) -> int:
    """Rows of a tile of that width: whole blocks of the target, and whole ones of the source or within one."""
    room, least = max(1, TILE // width), target.block[0]
    if room >= _tall(source, target):
        return room - room % _tall(source, target)
    within = [n for n in range(least, source.block[0], least) if source.block[0] % n == 0 and n <= room]
    return within[-1] if within else (least if source.block[0] % least == 0 else _tall(source, target))


def _tile(source: Coding, parts: Parts, rows: tuple[int, int], columns: tuple[int, int]) -> Parts:
    """The parts of a rectangle that begins with a block of columns."""
    tall, wide = source.block
    down = slice(*rows)
    tile = {"values": parts["values"][down, columns[0] // source.pack : -(-columns[1] // source.pack)]}
    if source.scale is not None:
        tile["scale"] = parts["scale"][
            rows[0] // tall : -(-rows[1] // tall), columns[0] // wide : -(-columns[1] // wide)
        ]
    if source.tensor_scale:
        tile["global_scale"] = parts["global_scale"]
    return tile


def _by_table(source: Coding, target: Coding, tile: Parts) -> tuple[dict[str, Array], Errors]:
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
