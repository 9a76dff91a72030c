"""Unsharded weights in the precision of a plan: what was converted is put together from the shards of all ranks.

Whether they hold what the checkpoint's weights become is compared apart, byte by byte (check --deep).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from converter.backward.gather import BLOCK, Shards, overlap, put, whole
from converter.streams.reading import Reader
from runtime.loading.reading import as_stored
from shard_plans.checkpoints.dtypes import DTYPE_BITS
from shard_plans.errors import ManifestError
from shard_plans.families.parameter import Part


class Rebuilt:
    """Reads converted parts out of shards. Close it at the end."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._reader = Reader(shards.out, ManifestError)
        self._room = np.empty(BLOCK, np.uint8)

    def part(self, part: Part, per_expert: bool) -> Tensor:
        """One part of a parameter as the converted checkpoint has it, or all experts' stacked."""
        entries = [self._entry(part, number) for number in range(len(part.tensors))]
        return torch.stack(entries) if per_expert else entries[0]

    def _entry(self, part: Part, number: int) -> Tensor:
        item = DTYPE_BITS[part.dtype] // 8
        made = np.zeros(part.shape, f"u{item}")
        covered = np.zeros(part.shape, np.bool_)
        name = part.pattern if part.stacked else part.pattern.replace("{expert}", str(number))
        first = [(number, number + 1)] if part.stacked else []
        for held in self._shards.holders(name, True):
            found = overlap(held, [*first, *((0, size) for size in part.shape)])
            if found is None:
                continue
            spans, indexes = found
            image = self._shards.read(self._reader, held, spans, self._room)
            if part.stacked:
                image, indexes = image[0], indexes[1:]
            put(made, indexes, image)
            put(covered, indexes, True)
            if whole(indexes, part.shape) or covered.all():
                break
        if not covered.all():
            raise ManifestError(f"{self._shards.out} lacks some of {name}; run reshard check --deep")
        return as_stored(torch.from_numpy(made.view(np.uint8).reshape(-1)), part.dtype, part.shape)

    def close(self) -> None:
        """Close the files."""
        self._reader.close()
