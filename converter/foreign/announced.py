"""The checkpoint that a config.json announces, divided into files as published ones are: what a folder stands for."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shard_plans.checkpoints.checkpoint import INDEX, SINGLE, Checkpoint, from_headers
from shard_plans.checkpoints.dtypes import DTYPE_BITS
from shard_plans.checkpoints.headers import Header, Kinds, parse_header
from shard_plans.families.binding import Binding

LARGEST = 5_000_000_000
"""Bytes of one file, about."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True, slots=True)
class Announced:
    """A checkpoint that there is no file of."""

    checkpoint: Checkpoint
    headers: dict[str, bytes]
    """The JSON header of each of its files."""
    carried: dict[str, bytes]
    """config.json and, where there are several files, the index."""


def announce(binding: Binding, folder: Path, config: bytes, carried: tuple[str, ...]) -> Announced:
    """What the config announces, without the layers for multi-token prediction, which engines' folders lack."""
    files = list(_files(_stored(binding)))
    count = len(files)
    names = [f"model-{place:05}-of-{count:05}.safetensors" for place in range(1, count + 1)] if count > 1 else [SINGLE]
    texts: dict[str, bytes] = {}
    read: list[tuple[str, Header]] = []
    weight_map: dict[str, str] = {}
    kinds, total = Kinds(), 0
    for name, tensors in zip(names, files, strict=True):
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        place = 0
        for tensor in tensors:
            span = [place, place := place + tensor.nbytes]
            entries[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": span}
            weight_map[tensor.name] = name
        text = json.dumps(entries, separators=(",", ":")).encode()
        texts[name] = text + b" " * (-len(text) % 8)
        read.append((name, parse_header(folder / name, texts[name], 8 + len(texts[name]) + place, kinds)))
        total += place
    small = {"config.json": config}
    if count > 1:
        small[INDEX] = (
            json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2).encode() + b"\n"
        )
    return Announced(from_headers(folder, config, read, tuple(sorted({*carried, *small}))), texts, small)


def _stored(binding: Binding) -> Iterator[_Tensor]:
    """Every stored tensor, in execution order."""
    for parameter in binding.parameters:
        for part in parameter.all_parts if parameter.stage != "mtp" else ():
            count = len(part.tensors)
            if part.stacked:
                yield _Tensor(part.pattern, part.dtype, (count, *part.shape))
            else:
                for number in range(count):
                    yield _Tensor(part.pattern.replace("{expert}", str(number)), part.dtype, part.shape)


def _files(tensors: Iterable[_Tensor]) -> Iterator[list[_Tensor]]:
    """Tensors in order, a new file whenever one would grow too large."""
    held: list[_Tensor] = []
    size = 0
    for tensor in tensors:
        if held and size + tensor.nbytes > LARGEST:
            yield held
            held, size = [], 0
        held.append(tensor)
        size += tensor.nbytes
    yield held
