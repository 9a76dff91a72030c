"""Converted outputs read back from their files alone: every matrix put together and decoded, beside its source."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.tools import formats

Array = np.ndarray[Any, np.dtype[Any]]
ITEM = {"U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "BF16": 2, "F16": 2, "F32": 4, "I32": 4, "I64": 8, "F64": 8}


@dataclass(frozen=True, slots=True)
class Matrix:
    """One converted matrix, as the output holds it and as the checkpoint does."""

    name: str
    """Of its values in the converted checkpoint."""
    made: Array
    """float64."""
    stored: Array
    parts: dict[str, Array]
    """As stored in the output, put together from all ranks."""
    dtypes: dict[str, str]
    block: tuple[int, int] | None
    """Rows and columns that share a scale, of the whole matrix."""
    errors: dict[str, list[float]]
    """File -> largest, mean, cosine, NaN, infinities as its manifest states them."""


def read_file(path: Path) -> dict[str, tuple[str, tuple[int, ...], Array]]:
    """The tensors of a safetensors file: type, shape, and elements as unsigned integers."""
    raw = path.read_bytes()
    length = 8 + int.from_bytes(raw[:8], "little")
    found = {}
    for name, entry in json.loads(raw[8:length]).items():
        if name != "__metadata__":
            start, stop = entry["data_offsets"]
            data = np.frombuffer(raw[length + start : length + stop], f"<u{ITEM[entry['dtype']]}")
            found[name] = entry["dtype"], tuple(entry["shape"]), data.reshape(entry["shape"])
    return found


def read_checkpoint(folder: Path) -> dict[str, tuple[str, tuple[int, ...], Array]]:
    """All tensors of a checkpoint."""
    return {name: found for path in sorted(folder.glob("*.safetensors")) for name, found in read_file(path).items()}


def matrices(out: Path, checkpoint: Path, block: tuple[int, int] | None = None) -> Iterator[Matrix]:
    """Every converted matrix of an output of all ranks; `block` is the checkpoint's, where it is quantised."""
    source = read_checkpoint(checkpoint)
    whole: dict[str, tuple[str, dict[str, Array]]] = {}
    facts: dict[str, dict[str, Any]] = {}
    root = json.loads((out / "manifest.json").read_bytes())
    for file in root["files"]:
        held = read_file(out / file["name"])
        for entry in json.loads((out / file["manifest"]).read_bytes())["tensors"]:
            for piece in entry["sources"]:
                if "converted" in piece:
                    _collect(entry, piece, held[entry["name"]][2], file["name"], whole, facts)
    for key, fact in facts.items():
        parts, dtypes = {}, {}
        for kind, (dtype, pieces) in fact["parts"].items():
            parts[kind], dtypes[kind] = _joined(pieces), dtype
        columns = formats.nibbles(parts["values"].reshape(len(parts["values"]), -1)).shape[-1]
        shape = parts["values"].shape if dtypes["values"] not in ("U8", "I32") else (len(parts["values"]), columns)
        made_block = None
        if "scale" in parts:
            made_block = tuple(-(-size // count) for size, count in zip(shape, parts["scale"].shape, strict=True))
            made_block = tuple(  # the last block may be partial
                next(b for b in (1, 16, 32, 128, size) if -(-size // b) == count and b >= least)
                for size, count, least in zip(shape, parts["scale"].shape, made_block, strict=True)
            )
        made = formats.decode(parts, dtypes, made_block)
        stored = _source(fact["tensors"], fact["expert"], source, block)
        stored = stored.T if stored.shape != made.shape else stored
        yield Matrix(key, made, stored, parts, dtypes, made_block, fact["errors"])


def _collect(
    entry: dict[str, Any], piece: dict[str, Any], held: Array, file: str, whole: Any, facts: dict[str, dict[str, Any]]
) -> None:
    ids = [None] if piece["experts"] is None else _ids(piece["experts"])
    for position, expert in enumerate(ids):
        data = held if expert is None else held[position]
        lengths = [sum(b - a for a, b in cut["runs"]) for cut in piece["cuts"]]
        part = data[tuple(slice(at, at + n) for at, n in zip(piece["at"], lengths, strict=True))]
        stem = piece["converted"]["tensors"][0]
        key = f"{stem.replace('{expert}', str(expert))}" + (
            "" if "{expert}" in stem or expert is None else f"[{expert}]"
        )
        fact = facts.setdefault(key, {"parts": {}, "tensors": piece["converted"]["tensors"], "errors": {}})
        fact["expert"] = expert
        fact["parts"].setdefault(entry["part"], (entry["dtype"], []))[1].append((piece["cuts"], part))
        if "errors" in piece["converted"]:
            fact["errors"][file] = piece["converted"]["errors"][position]


def _joined(pieces: list[tuple[list[dict[str, Any]], Array]]) -> Array:
    """The stored tensor of which every rank has a part: position p of a run holds the stored element p // repeat."""
    indexes = [
        [np.array([p // cut["repeat"] for a, b in cut["runs"] for p in range(a, b)], np.int64) for cut in cuts]
        for cuts, _ in pieces
    ]
    shape = tuple(max(int(index[axis].max(initial=-1)) + 1 for index in indexes) for axis in range(len(indexes[0])))
    joined, seen = np.zeros(shape, pieces[0][1].dtype), np.zeros(shape, np.bool_)
    for index, (_, part) in zip(indexes, pieces, strict=True):
        place = np.ix_(*index)
        assert np.array_equal(np.where(seen[place], joined[place], part), part), "replicas differ"
        joined[place], seen[place] = part, True
    assert seen.all()
    return joined


def _source(names: list[str], expert: int | None, source: Any, block: tuple[int, int] | None) -> Array:
    found = {}
    for kind, name in zip(("values", "scale", "global_scale"), names, strict=False):
        stacked = expert is not None and "{expert}" not in name
        dtype, _, data = source[name if stacked or expert is None else name.replace("{expert}", str(expert))]
        found[kind] = dtype, data[expert] if stacked else data
    parts = {kind: data for kind, (_, data) in found.items()}
    dtypes = {kind: "F8_E8M0" if kind == "scale" and dtype == "U8" else dtype for kind, (dtype, _) in found.items()}
    if "scale" not in parts:
        whole: Array = formats.number(parts["values"], dtypes["values"])
        return whole.reshape(len(whole), -1)
    return formats.decode(parts, dtypes, block)


def _ids(text: str) -> list[int]:
    found: list[int] = []
    for word in text.split(","):
        first, _, last = word.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found
