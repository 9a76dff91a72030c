"""How far converted numbers are from those of the source, as float64 finds them."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
_FIELDS = struct.Struct("<qqqddddd")


@dataclass(slots=True)
class Errors:
    """Sums over the elements of a matrix, or of some rows of it, so that rows can be added up."""

    nan: int = 0
    infinite: int = 0
    """Elements of the source that are NaN, or infinite; they are in no other figure."""
    counted: int = 0
    """Elements that are finite and not zero."""
    largest: float = 0.0
    """Of |converted - source| / |source|."""
    total: float = 0.0
    """Sum of the same."""
    source: float = 0.0
    """Sum of source squared."""
    made: float = 0.0
    """Sum of converted squared."""
    product: float = 0.0
    """Sum of source times converted."""

    def add(self, other: Errors) -> None:
        """Add those of more rows."""
        self.nan += other.nan
        self.infinite += other.infinite
        self.counted += other.counted
        self.largest = max(self.largest, other.largest)
        self.total += other.total
        self.source += other.source
        self.made += other.made
        self.product += other.product

    @property
    def mean(self) -> float:
        """Mean relative error; 0 where nothing is counted."""
        return self.total / self.counted if self.counted else 0.0

    @property
    def cosine(self) -> float:
        """Between source and converted; 1 where both are zero, 0 where one of them is."""
        if self.source == 0 or self.made == 0:
            return 1.0 if self.source == self.made else 0.0
        if self.total == 0:
            return 1.0
        return self.product / (math.sqrt(self.source) * math.sqrt(self.made))

    def pack(self) -> bytes:
        """As bytes, for the journal."""
        return _FIELDS.pack(
            self.nan, self.infinite, self.counted, self.largest, self.total, self.source, self.made, self.product
        )


SIZE = _FIELDS.size
"""Bytes of a packed one."""


def unpack(data: bytes) -> list[Errors]:
    """The inverse of `pack`, for as many as there are."""
    return [Errors(*fields) for fields in _FIELDS.iter_unpack(data)]


def compare(source: Array, made: Array) -> Errors:
    """Of two float32 arrays of one shape."""
    finite = np.isfinite(source)
    found = Errors()
    if not finite.all():
        nan = int(np.count_nonzero(np.isnan(source)))
        found.nan, found.infinite = nan, int(source.size - np.count_nonzero(finite)) - nan
        source, made = source[finite], made[finite]
    found.counted = int(np.count_nonzero(source))
    x = source.astype(np.float64)
    if np.array_equal(source, made):
        found.source = found.made = found.product = float(np.square(x, out=x).sum())
        return found
    y = made.astype(np.float64)
    work = np.multiply(x, y)
    found.product = float(work.sum())
    found.source = float(np.square(x, out=work).sum())
    found.made = float(np.square(y, out=work).sum())
    np.subtract(y, x, out=y)
    x[x == 0] = 1.0  # they stay zero in every format
    y /= x
    np.abs(y, out=y)
    found.largest, found.total = float(y.max(initial=0.0)), float(y.sum())
    return found


def of_tables(source: Array, made: Array, counts: Array) -> Errors:
    """The same of numbers that occur `counts` times each; float32, any shape."""
    found = Errors()
    present = counts > 0
    x, y, n = source[present].astype(np.float64), made[present].astype(np.float64), counts[present]
    finite = np.isfinite(x)
    if not finite.all():
        nan = int(n[np.isnan(x)].sum())
        found.nan, found.infinite = nan, int(n[~finite].sum()) - nan
        x, y, n = x[finite], y[finite], n[finite]
    found.counted = int(n[x != 0].sum())
    found.source, found.made = float((x * x * n).sum()), float((y * y * n).sum())
    found.product = float((x * y * n).sum())
    relative = np.abs((y - x) / np.where(x == 0, 1.0, x))
    found.largest, found.total = float(relative.max(initial=0.0)), float((relative * n).sum())
    return found
