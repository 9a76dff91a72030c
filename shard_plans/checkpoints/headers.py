"""The header of one safetensors file, read as untrusted input into columns."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import xxhash

from shard_plans.checkpoints.collector import undisturbed
from shard_plans.checkpoints.dtypes import DTYPE_BITS
from shard_plans.checkpoints.regular import open_regular
from shard_plans.errors import CheckpointError

HEADER_LIMIT = 100_000_000
"""Bytes that the safetensors format allows a header."""
LARGEST = 2**63 - 1
UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
FIELDS = {"dtype", "shape", "data_offsets"}
NEGATIVE_ZERO = re.compile(r"-0[,\]\s]")

Int64 = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Header:
    """One file's tensors, in the order of their bytes."""

    size: int
    """Bytes of the whole file."""
    header_size: int
    """Bytes of the JSON header; the data start at 8 + header_size."""
    header_digest: str
    """xxh3-128 of the JSON header, in hex."""
    metadata: Mapping[str, str]
    """The file's `__metadata__`."""
    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    starts: Int64
    """Absolute byte offsets in the file."""
    sizes: Int64
    """Bytes."""


class Kinds:
    """Dtypes and shapes seen so far, each kept once with its bits: half a million tensors share a few dozen."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, tuple[int, ...]], tuple[tuple[int, ...], int]] = {}

    def intern(self, dtype: str, shape: list[int]) -> tuple[tuple[int, ...], int]:
        """The kept tuple for `shape`, and the bits of such a tensor; ValueError says what is wrong with it."""
        if not set(map(type, shape)) <= {int}:  # checked first: True and 1.0 are equal to 1 as keys
            raise ValueError(f"has the shape {brief(shape)}; every size must be a whole number")
        key = (dtype, tuple(shape))
        found = self.known.get(key)
        if found is None:
            bits = DTYPE_BITS[dtype]
            for size in shape:
                bits *= size
                if size < 0 or bits > LARGEST or size > LARGEST:
                    raise ValueError(f"has the shape {brief(shape)} of {dtype}; its bits aren't in 0..2^63-1")
            found = self.known[key] = (key[1], bits)
        return found


@undisturbed
def read_header(path: Path, kinds: Kinds) -> Header:
    """Read and check the header of the safetensors file at `path`.

    Raises CheckpointError unless the header is what the format asks for and its tensors cover the data exactly.
    """
    raw, size = _read_raw(path)
    return parse_header(path, raw, size, kinds)


def parse_header(path: Path, raw: bytes, size: int, kinds: Kinds) -> Header:
    """The same from the bytes of the JSON header of a file of `size` bytes; `path` names it in messages."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"the header of {path} isn't UTF-8 at byte {error.start}") from error
    entries = load_json(text, f"the header of {path}", exact_integers=bool(NEGATIVE_ZERO.search(text)))
    if not isinstance(entries, dict):
        raise CheckpointError(f"the header of {path} isn't a JSON object")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"__metadata__ in {path} must map words to words")
    names, dtypes, shapes, begins, ends = list(entries), [], [], [], []
    for name, entry in entries.items():
        try:
            dtype, shape, (begin, end) = _fields(entry)
            kept, bits = kinds.intern(dtype, shape)
            if bits != (end - begin) * 8:
                needed = f"{dtype} {brief(kept)}, {bits / 8:.15g} bytes"
                raise ValueError(f"is {needed}, but its data_offsets hold {end - begin}")
        except ValueError as error:
            raise CheckpointError(f"tensor {brief(name)} in {path} {error}") from None
        dtypes.append(dtype)
        shapes.append(kept)
        begins.append(begin)
        ends.append(end)
    check_words("\n".join(metadata) + "".join(metadata.values()), f"__metadata__ in {path}", r"[\ud800-\udfff]")
    check_words("".join(names), f"a tensor name in {path}")
    starts, stops = np.array(begins, np.int64), np.array(ends, np.int64)
    order = np.lexsort((stops, starts))
    starts, stops, rows = starts[order], stops[order], order.tolist()
    names = [names[row] for row in rows]
    _check_cover(path, starts, stops, names, size - 8 - len(raw))
    return Header(
        size, len(raw), xxhash.xxh3_128_hexdigest(raw), metadata, names, [dtypes[row] for row in rows],
        [shapes[row] for row in rows], starts + (8 + len(raw)), stops - starts,
    )  # fmt: skip


def _read_raw(path: Path) -> tuple[bytes, int]:
    try:
        with open(open_regular(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, HEADER_LIMIT):
                raise CheckpointError(
                    f"{path} of {size} bytes states a header of {length} bytes; at most {min(size - 8, HEADER_LIMIT)} "
                    f"can be: the file is truncated or not safetensors"
                )
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}") from error
    if len(raw) != length or not raw.startswith(b"{"):
        raise CheckpointError(f"the header of {path} doesn't start with '{{' or ends early: not a safetensors file")
    return raw, size


def _fields(entry: Any) -> tuple[str, list[int], list[int]]:
    """dtype, shape and data_offsets of one tensor; ValueError says what is wrong with them."""
    if not isinstance(entry, dict) or len(entry) != 3 or entry.keys() != FIELDS:
        raise ValueError(f"must have dtype, shape and data_offsets and nothing else, not {brief(entry)}")
    dtype, shape, span = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise ValueError(f"has the dtype {brief(dtype)}; known are {', '.join(DTYPE_BITS)}")
    if not isinstance(shape, list):
        raise ValueError(f"has the shape {brief(shape)}, which isn't a list")
    if not isinstance(span, list) or len(span) != 2 or type(span[0]) is not int or type(span[1]) is not int:
        raise ValueError(f"has the data_offsets {brief(span)}; they must be two whole numbers, [start, end]")
    if not 0 <= span[0] <= span[1] <= LARGEST:
        raise ValueError(f"has the data_offsets {brief(span)}; they must be [start, end] with 0 <= start <= end")
    return sys.intern(dtype), shape, span


def _check_cover(path: Path, starts: Int64, stops: Int64, names: list[str], data: int) -> None:
    """Each tensor must begin where the one before it ends, and the last end with the file."""
    ends = np.concatenate((np.zeros(1, np.int64), stops))
    wrong = np.flatnonzero(starts != ends[:-1])
    if len(wrong):
        row = int(wrong[0])
        kind = "overlaps the tensor before it" if starts[row] < ends[row] else "leaves a hole before it"
        raise CheckpointError(
            f"tensor {brief(names[row])} in {path} {kind}: it starts at {starts[row]}, those before end at {ends[row]}"
        )
    if ends[-1] != data:
        raise CheckpointError(
            f"{path} holds {data} bytes of data, but its header describes {ends[-1]}: it is truncated or has a tail"
        )


def load_json(text: str, what: str, exact_integers: bool = False) -> Any:
    """Parse JSON strictly: no duplicate names, no NaN or Infinity, no nesting that exhausts the stack.

    `exact_integers` also refuses -0, which Python reads as 0 and other readers as a fraction.
    """
    integer = _strict_integer if exact_integers else None
    try:
        return json.loads(
            text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_int=integer, parse_float=_finite
        )
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CheckpointError(f"{what} isn't the JSON that is expected: {reason}") from error


def _strict_integer(text: str) -> int:
    if text == "-0":
        raise ValueError("-0 isn't a size")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{brief(text)} is too large a number")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the name {brief(name)} occurs twice")
            seen.add(name)
    return made


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} isn't a JSON number")


def check_words(text: str, what: str, pattern: str | re.Pattern[str] = UNPRINTABLE) -> None:
    """Refuse text that can't be printed or written as UTF-8."""
    found = re.search(pattern, text)
    if found:
        raise CheckpointError(f"{what} holds the character {found.group()!a}, which no name may hold")


def brief(value: Any) -> str:
    """`value` for a message: ASCII and at most 80 characters, whatever a stranger wrote."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return f"a number of about {math.floor(value.bit_length() * 0.30103)} digits"
    if isinstance(value, (list, tuple)):
        shown = ", ".join(brief(item) for item in value[:4]) + (", ..." if len(value) > 4 else "")
        return f"[{shown}]" if len(shown) <= 120 else f"a list of {len(value)}"
    if isinstance(value, dict):
        return "an object with " + (", ".join(brief(key) for key in list(value)[:4]) or "nothing")
    text = ascii(value) if not isinstance(value, str) else ascii(value[:81])
    return text if len(text) <= 80 else text[:77] + "..."
