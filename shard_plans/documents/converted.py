"""What the manifest of a shard file says of a tensor whose precision was changed: what it was, and the errors made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

KEYS = ("largest", "mean", "cosine", "nan", "infinite")
DIGITS = 9
"""Significant digits of errors in a manifest."""


@dataclass(frozen=True, slots=True)
class MatrixErrors:
    """How far the numbers of one whole matrix are from those of the checkpoint, as a float64 comparison finds them."""

    largest: float
    """Of |converted - stored| / |stored|, over elements that are finite and not zero."""
    mean: float
    """Of the same."""
    cosine: float
    """Between the two matrices."""
    nan: int = 0
    infinite: int = 0
    """Elements of the checkpoint's matrix that are NaN, or infinite: they are in no other figure."""


@dataclass(frozen=True, slots=True)
class Converted:
    """Where a converted region came from."""

    format: str
    """A storage format, or the type of plain values."""
    tensors: tuple[str, ...]
    """Stored names of the values and what belongs to them, with `{expert}` where each has tensors of its own."""
    errors: tuple[MatrixErrors, ...] = field(default=(), compare=False)
    """Of each expert in stacking order, or of the one matrix; with the values alone."""


def rounded(value: float) -> float:
    """To the digits that a manifest keeps."""
    return float(f"{value:.{DIGITS}g}")


def converted_entry(converted: Converted) -> dict[str, Any]:
    """As JSON."""
    entry: dict[str, Any] = {"from": converted.format, "tensors": converted.tensors}
    if converted.errors:
        entry["errors"] = [[getattr(errors, key) for key in KEYS] for errors in converted.errors]
    return entry


def parse_converted(value: Mapping[str, Any], matrices: int) -> Converted:
    """The inverse, for a piece of so many matrices. Raises ValueError with what is wrong."""
    word, names, listed = value["from"], value["tensors"], value.get("errors", [])
    if type(word) is not str or not 0 < len(word) <= 100:
        raise ValueError("isn't said to be converted from a format")
    named = type(names) is list and all(type(name) is str and 0 < len(name) < 1000 for name in names)
    if not named or not 0 < len(names) <= 8:
        raise ValueError("doesn't name the tensors that it was converted from")
    if type(listed) is not list or len(listed) not in (0, matrices):
        raise ValueError(f"doesn't list the errors of {matrices} matrices")
    return Converted(word, tuple(names), tuple(_errors(entry) for entry in listed))


def _errors(entry: Any) -> MatrixErrors:
    if type(entry) is not list or len(entry) != len(KEYS):
        raise ValueError(f"doesn't give {', '.join(KEYS)} as its errors")
    numbers, counts = entry[:3], entry[3:]
    if not all(type(n) in (int, float) and math.isfinite(n) and n > -2 for n in numbers):
        raise ValueError("has errors that aren't numbers")
    if not all(type(n) is int and 0 <= n < 1 << 53 for n in counts):
        raise ValueError("has counts of NaN and infinities that aren't numbers")
    return MatrixErrors(float(numbers[0]), float(numbers[1]), float(numbers[2]), counts[0], counts[1])
