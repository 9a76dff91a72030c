"""Folders of safetensors files: written as published checkpoints are, and read back."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

INDEX = "model.safetensors.index.json"


def write_checkpoint(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], files: int) -> None:
    """config.json and about `files` files with an index, or one model.safetensors without an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    if files == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return
    total = sum(tensor.nbytes for tensor in tensors.values())
    parts = list(split(tensors, math.ceil(total / files)))
    weight_map: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        name = f"model-{number:05}-of-{len(parts):05}.safetensors"
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")


def split(tensors: Mapping[str, Tensor], limit: int) -> Iterator[dict[str, Tensor]]:
    """Tensors in order, a new part whenever one would grow beyond `limit` bytes."""
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if part and size + tensor.nbytes > limit:
            yield part
            part, size = {}, 0
        part[name] = tensor.contiguous()
        size += tensor.nbytes
    yield part


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the checkpoint's files (`model*.safetensors`), in the order of files and names."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    return tensors
