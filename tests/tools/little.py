"""Little checkpoints made from a family table and a config alone: a few kilobytes, random bytes, no model library.

The table says what is stored under which names and how long it is; every byte is drawn, so that each one matters.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shard_plans.checkpoints.dtypes import DTYPE_BITS
from shard_plans.families.dims import extent, settled, stored_extent
from shard_plans.families.family import Family
from shard_plans.families.formats import Format, config_format
from shard_plans.families.model import Model, bind_model, wanted
from shard_plans.families.rows import Row, bias_row

INDEX = "model.safetensors.index.json"
TAIL = 3
"""Zeros that are stored behind a dimension that ends in `+ zeros`, and the length of one that is `any`."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One stored tensor."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def little_tensors(family: Family, config: Mapping[str, Any], dice: random.Random) -> dict[str, Stored]:
    """What a checkpoint of this table and config stores: optional rows and quantised forms as the dice fall."""
    model = bind_model(family, config)
    format = config_format(model.text)
    tensors: dict[str, Stored] = {}
    for row in family.rows:
        for stored in (row, bias_row(row)) if row.bias else (row,):
            if not wanted(stored, model) or (stored.tied and config.get("tie_word_embeddings")):
                continue
            for where in _places(stored, model, family):
                if stored.optional and dice.random() < 0.5:
                    continue
                own = format.of(stored.group) if format is not None and stored.quant else None
                quantised = own if dice.random() < 0.8 else None
                names = [stored.name.replace("{expert}", str(e)) for e in range(_experts(stored, model))]
                for name in names:
                    for hole, number in where.items():
                        name = name.replace(f"{{{hole}}}", str(number))
                    tensors |= _store(name, stored, model, quantised, family.stored, dice)
    return tensors


def _experts(row: Row, model: Model) -> int:
    return model.sizes["experts"] if row.per_expert else 1


def _places(row: Row, model: Model, family: Family) -> Iterator[dict[str, int]]:
    """What stands at the holes of the row's name, one after the other."""
    if row.section.stage == "layer":
        for layer in model.layers:
            if row.section.applies(layer.kinds, layer.mtp):
                yield {"layer": layer.index}
    elif row.hole is not None:
        yield from ({row.hole: block} for block in range(model.sizes[family.holes[row.hole]]))
    else:
        yield {}


def _store(
    name: str, row: Row, model: Model, format: Format | None, stored: str | None, dice: random.Random
) -> dict[str, Stored]:
    dims = row.dims[1:] if row.stacked else row.dims
    shape = tuple(extent(settled(dim, TAIL), model.sizes) for dim in dims)
    stack = (model.sizes["experts"],) if row.stacked else ()
    swapped = (*shape[:-2], shape[-1], shape[-2]) if row.quant == "swapped" else shape
    if format is not None and swapped[-1] % (format.pack * format.fold) == 0:
        shape = swapped
        found = {
            name + format.values_suffix: drawn(format.values_dtypes[0], (*stack, *format.values_shape(shape)), dice),
            name + format.scale_suffix: drawn(format.scale_dtypes[0], (*stack, *format.scale_shape(shape)), dice),
        }
        if format.shape_suffix is not None:
            facts = b"".join(size.to_bytes(4, "little") for size in shape[-2:])
            found[name + format.shape_suffix] = Stored(format.shape_dtypes[0], (2,), facts)
        return found
    dtype = row.dtype or row.usual or stored or "BF16"
    tensor = drawn(dtype, (*stack, *shape), dice)
    if len(dims) == 1 and dims[0].zeros:  # rows of more dimensions may have a tail, and needn't
        tail = stored_extent(dims[0], model.sizes) - shape[0] if dims[0].whole is not None else TAIL
        tensor = Stored(dtype, (shape[0] + tail,), tensor.data + bytes(tail * DTYPE_BITS[dtype] // 8))
    return {name: tensor}


def drawn(dtype: str, shape: tuple[int, ...], dice: random.Random) -> Stored:
    """A tensor of random bytes, none of them zero: what is lost can't be taken for padding."""
    size = math.prod(shape) * DTYPE_BITS[dtype] // 8
    return Stored(dtype, shape, bytes(dice.choices(range(1, 256), k=size)))


def write_little(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Stored], files: int = 2, shuffle: int | None = None
) -> Path:
    """config.json and that many files with an index, or model.safetensors alone; `shuffle`: in an order of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    names = list(tensors)
    if shuffle is not None:
        random.Random(shuffle).shuffle(names)
    if files == 1:
        (folder / "model.safetensors").write_bytes(safetensors_bytes({name: tensors[name] for name in names}))
        return folder
    weight_map: dict[str, str] = {}
    for number in range(files):
        part = {name: tensors[name] for name in names[number::files]}
        name = f"model-{number + 1:05}-of-{files:05}.safetensors"
        (folder / name).write_bytes(safetensors_bytes(part))
        weight_map |= dict.fromkeys(part, name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1) + "\n")
    return folder


def safetensors_bytes(tensors: Mapping[str, Stored]) -> bytes:
    """A safetensors file of these tensors, in this order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [end, end + len(tensor.data)],
        }  # fmt: skip
        end += len(tensor.data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(tensor.data for tensor in tensors.values())
