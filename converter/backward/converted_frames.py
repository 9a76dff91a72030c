"""The files of the converted checkpoint: where a weight was converted, its new parts lie in the place of its values."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from converter.backward.frames import StoredTensor
from converter.backward.gather import Shards
from converter.backward.recomputed import made_name
from converter.backward.regions import Regions
from converter.output.partial import partial_path, reserve
from converter.streams.writing import allocate, write_fault
from shard_plans.checkpoints.checkpoint import Checkpoint
from shard_plans.checkpoints.dtypes import DTYPE_BITS
from shard_plans.documents.plan import Plan
from shard_plans.errors import OutputError
from shard_plans.families.binding import Binding
from shard_plans.families.parameter import Parameter, logical_shape


@dataclass(frozen=True, slots=True)
class _New:
    """A tensor of the converted checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    converted: bool = False
    content: bytes | None = None

    @property
    def size(self) -> int:
        bits = DTYPE_BITS[self.dtype]
        for length in self.shape:
            bits *= length
        return bits // 8


def make_converted_frames(
    shards: Shards, regions: Regions, checkpoint: Checkpoint, binding: Binding, plan: Plan, folder: Path
) -> tuple[list[StoredTensor], int]:
    """Make the partial files with their headers; their tensors, and how many of the checkpoint's are left out.

    `checkpoint` is as its kept headers describe it, `binding` is in the plan's precision.
    """
    replaced = _replaced(binding, plan)
    tensors: list[StoredTensor] = []
    dropped = 0
    order = np.lexsort((checkpoint.starts[: len(checkpoint)], checkpoint.file_numbers[: len(checkpoint)])).tolist()
    by_file: dict[int, list[_New]] = {}
    for number in order:
        name, file = checkpoint.names[number], int(checkpoint.file_numbers[number])
        if name in replaced:
            by_file.setdefault(file, []).extend(replaced[name])
        elif shards.holders(name) or regions.of(name):
            kept = _New(name, checkpoint.dtypes[number], checkpoint.shapes[number])
            by_file.setdefault(file, []).append(kept)
        else:
            dropped += 1
    for file, news in by_file.items():
        tensors += _write_frame(folder, checkpoint.files[file].name, news)
    return tensors, dropped


def _replaced(binding: Binding, plan: Plan) -> dict[str, list[_New]]:
    """Stored name -> what lies in its place; nothing for scales, which have no place of their own."""
    found: dict[str, list[_New]] = {}
    for parameter in binding.parameters:
        stored = parameter.source
        if stored is None or (parameter.stage == "mtp" and plan.mtp == "drop"):
            continue
        for entry in range(len(stored.parts[0].tensors)):
            for part in stored.all_parts:
                found.setdefault(made_name(part, entry), [])
            found[made_name(stored.parts[0], entry)] = list(_parts(parameter, entry))
    return found


def _parts(parameter: Parameter, entry: int) -> Iterator[_New]:
    count = len(parameter.parts[0].tensors)
    for part in parameter.parts:
        yield _New(made_name(part, entry), part.dtype, (count, *part.shape) if part.stacked else part.shape, True)
    format = parameter.format
    if format is not None and format.shape_suffix is not None:
        stem = made_name(parameter.parts[0], entry).removesuffix(format.values_suffix)
        size = np.array(logical_shape(parameter)[-2:], "<i4")
        yield _New(stem + format.shape_suffix, "I32", (2,), content=size.tobytes())


def _write_frame(folder: Path, file: str, news: list[_New]) -> list[StoredTensor]:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for new in news:
        entries[new.name] = {"dtype": new.dtype, "shape": new.shape, "data_offsets": [end, end + new.size]}
        end += new.size
    if len(entries) != len(news) + 1:
        raise OutputError(f"two tensors of {file} would get one name in the converted checkpoint")
    raw = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    path = partial_path(folder, file)
    reserve(folder, file, 0)
    try:
        with open(path, "r+b") as handle:
            handle.write(len(raw).to_bytes(8, "little") + raw)
            handle.flush()
            allocate(handle.fileno(), 8 + len(raw) + end)
    except OSError as error:
        raise write_fault(path, error) from error
    start, made = 8 + len(raw), []
    for new in news:
        made.append(StoredTensor(file, new.name, new.dtype, new.shape, start, new.size, new.converted, new.content))
        start += new.size
    return made
