"""What the ranks of a process hold, section by section, and which sections stay in memory between passes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby

from torch import Tensor

from runtime.blocks.weights import LayerWeights, Stored
from runtime.loading.matrices import largest
from runtime.loading.reading import as_stored
from runtime.loading.sections import FIRST, LAST, VISION, section_of
from runtime.loading.stretches import Arranged, arrange
from shard_plans.checkpoints.dtypes import DTYPE_BITS
from shard_plans.documents.manifest import ManifestTensor, ShardManifest

Item = tuple[str, str]
"""A tensor: file and name."""


class Held:
    """Tensors by rank and section, of the files that some ranks read. A tensor that several share is one item."""

    def __init__(
        self,
        shards: Mapping[str, ShardManifest],
        files: Mapping[int, Sequence[str]],
        layers: Collection[int],
        tower: bool,
    ) -> None:
        """`files`: rank -> files. Of the layers only these; `tower`: only the vision tower."""
        self._shards = shards
        self._tensors = {(file, t.name): t for file, manifest in shards.items() for t in manifest.tensors}
        self.parts: dict[tuple[int, int], dict[str, Item]] = {}
        """(rank, section) -> short name -> tensor."""
        for rank, names in files.items():
            for file in names:
                for tensor in shards[file].tensors:
                    section, short = section_of(tensor.name)
                    if tensor.name.startswith(VISION) == tower and (section in layers or section in (FIRST, LAST)):
                        self.parts.setdefault((rank, section), {})[short] = (file, tensor.name)
            last, first = self.parts.get((rank, LAST)), self.parts.get((rank, FIRST), {})
            if last and "head" not in last and "embed" in first:
                last["embed"] = first["embed"]
        self.sections = tuple(sorted({section for _, section in self.parts}))
        """In execution order."""
        self.users = {s: [rank for rank in files if (rank, s) in self.parts] for s in self.sections}
        """Section -> the ranks that hold something of it."""
        self.items: dict[int, list[Item]] = {
            section: list({item: None for rank in self.users[section] for item in self.parts[rank, section].values()})
            for section in self.sections
        }
        homes: dict[Item, int] = {}
        self.shared: set[Item] = set()
        """Items of several sections: a tied embedding is needed at both ends of the pass."""
        for section, items in self.items.items():
            self.shared |= {item for item in items if homes.setdefault(item, section) != section}
        self._own = {s: [item for item in items if homes[item] == s] for s, items in self.items.items()}

    def tensor(self, item: Item) -> ManifestTensor:
        """What the manifest says of it."""
        return self._tensors[item]

    def arrange(self, items: Iterable[Item]) -> Arranged:
        """How these are read."""
        by_file = groupby(sorted(items), key=lambda item: item[0])
        return arrange([(self._shards[file], [self._tensors[item] for item in group]) for file, group in by_file])

    def largest_matrix(self) -> int:
        """Numbers of the largest matrix, as it is computed with."""
        wanted = {item for items in self.items.values() for item in items}
        tensors = (self._tensors[item] for item in wanted)
        return largest((t.name, t.dtype, t.shape, t.format) for t in tensors if t.part == "values")

    def memory(self) -> list[int]:
        """Bytes of memory that each section takes; shared items count where they come first."""
        return [self.arrange(self._own[section]).nbytes for section in self.sections]

    def kept(self, budget: int) -> tuple[set[Item], bool]:
        """Items that stay in memory: shared ones, and the first sections that fit into `budget` bytes; are they all."""
        found = set(self.shared)
        for section in self.sections:
            budget -= sum(self._tensors[item].nbytes for item in self._own[section])
            if budget < 0:
                return found, False
            found.update(self.items[section])
        return found, True

    def stored(self, rank: int, section: int, present: Mapping[Item, Tensor]) -> LayerWeights:
        """What a rank holds of a section, values joined with their scales."""
        found = {name: (self._tensors[item], present[item]) for name, item in self.parts[rank, section].items()}
        return {
            name: Stored(
                values, _beside(found, f"{name}.scale"), tensor.format, tensor.block,
                _beside(found, f"{name}.global_scale"),
            )
            for name, (tensor, values) in found.items() if tensor.part == "values"
        }  # fmt: skip


def _beside(found: Mapping[str, tuple[ManifestTensor, Tensor]], name: str) -> Tensor | None:
    return found[name][1] if name in found else None


def look(memory: Tensor, place: int, tensor: ManifestTensor) -> Tensor:
    """The tensor whose bytes lie at `place` of the `memory` [bytes]: a view, or a copy where it can't be one."""
    flat = memory[place : place + tensor.nbytes]
    if place % max(1, DTYPE_BITS[tensor.dtype] // 8):
        flat = flat.clone()
    return as_stored(flat, tensor.dtype, tensor.shape)
