"""Shard files without manifests: what their headers say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from shard_plans.checkpoints.checkpoint import inside
from shard_plans.checkpoints.headers import Header, Kinds, brief, read_header
from shard_plans.errors import ManifestError
from shard_plans.layouts.engine_files import EngineFiles, engine_files

LAYER = re.compile(r"model\.layers\.(\d+)\.")
Place = tuple[int, int]
"""Stage and tp rank."""
Kind = tuple[str, tuple[int, ...]]
"""Type and shape."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """An engine's folder, its headers read."""

    path: Path
    files: EngineFiles
    headers: Mapping[str, Header]
    """By file name."""
    tensors: Mapping[Place, Mapping[str, tuple[str, Kind]]]
    """What each rank holds: tensor -> its file, and what it is."""

    def stages(self, layers: int) -> tuple[tuple[int, int], ...]:
        """The half-open range of layers on each stage, of a model that has so many. Raises ManifestError."""
        last = self.files.stages - 1
        firsts = [0]
        for stage in range(1, last + 1):
            numbers = [int(match[1]) for name in self.tensors[stage, 0] if (match := LAYER.match(name))]
            if not numbers or not firsts[-1] < min(numbers) < layers:
                raise ManifestError(f"{self.path}: stage {stage} holds no layers behind those of the stage before it")
            firsts.append(min(numbers))
        return tuple(pairwise((*firsts, layers)))


def read_foreign(folder: Path) -> Foreign:
    """Read the headers of an engine's folder. Raises ManifestError where it is none, CheckpointError for a file."""
    files = engine_files(folder)
    if files is None:
        raise ManifestError(
            f"{folder} holds no shard files of an engine: neither vLLM's (model-rank-0-part-0.safetensors) nor "
            f"DeepSeek's (model0-mp8.safetensors)"
        )
    kinds, headers = Kinds(), {}
    tensors: dict[Place, dict[str, tuple[str, Kind]]] = {}
    for place, names in files.places.items():
        held = tensors.setdefault(place, {})
        for name in names:
            header = headers[name] = read_header(inside(folder, name), kinds)
            for tensor, dtype, shape in zip(header.names, header.dtypes, header.shapes, strict=True):
                if tensor in held:
                    raise ManifestError(f"{folder}: {held[tensor][0]} and {name} both hold {brief(tensor)}")
                held[tensor] = name, (dtype, shape)
    return Foreign(folder, files, headers, tensors)
