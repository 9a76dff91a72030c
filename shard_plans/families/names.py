"""Matching stored names to rows: numbers become `#`, one dictionary lookup a name, then the layer's kind decides."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shard_plans.checkpoints.checkpoint import Checkpoint
from shard_plans.errors import CheckpointError
from shard_plans.families.formats import Format
from shard_plans.families.model import Model
from shard_plans.families.rows import Row

Numbers = np.ndarray[Any, np.dtype[np.int64]]

_NUMBER = re.compile(r"\.([0-9]+)(?=\.)")
_HOLE = re.compile(r"\.(\{[a-z]+\}|[0-9]+)(?=\.)")
_ODD = re.compile(r"\.(0[0-9]|[0-9]{8})|#")
"""Numbers that another spelling of the same name would have (01 for 1), or that no model reaches; the mark itself."""


@dataclass(slots=True)
class Entry:
    """Stored names of one shape (numbers left out): which rows claim them and which tensors have it."""

    claims: list[tuple[Row, str, tuple[str, ...]]] = field(default_factory=list)
    """Row, part, and what stands at each number: a hole or digits."""
    tensors: list[int] = field(default_factory=list)
    numbers: list[tuple[int, ...]] = field(default_factory=list)


@dataclass(slots=True)
class Names:
    """Tensor numbers by row, part and layer."""

    found: dict[tuple[int, str, int | None], dict[int, int]]
    """(identity of the row, part, layer or block) -> expert (0 where there is none) -> tensor number."""
    unmatched: list[int]
    layers_seen: set[int]
    format: Format | None
    """The config's quantised format."""
    running: int
    """Layers that run; those for multi-token prediction follow."""

    def take(self, row: Row, part: str, index: int | None, model: Model) -> Numbers | None:
        """Tensor numbers in expert order; None where none is stored. CheckpointError where some experts lack it.

        `part`: plain, or the values, scale or shape of the quantised format; `index`: the layer, or the tower's block.
        """
        found = self.found.get((id(row), part, index))
        if found is None:
            return None
        count = model.sizes["experts"] if row.per_expert or row.stacked else 1
        if len(found) < count:
            lost = next(number for number in range(count) if number not in found)
            raise CheckpointError(
                f"tensor {self.stored_name(row, part, index, lost)} is missing: {len(found)} of {count} experts have it"
            )
        return np.fromiter((found[expert] for expert in range(count)), np.int64, count)

    def stacks(self, rows: Sequence[Row]) -> dict[tuple[int, str, int | None], int]:
        """Where in `found` a stored tensor stacks all experts, and which tensor it is."""
        stacked = {id(row) for row in rows if row.stacked}
        return {key: numbers[0] for key, numbers in self.found.items() if key[0] in stacked}

    def stored_name(self, row: Row, part: str, index: int | None, expert: int | None = 0) -> str:
        """The name under which a part of the row is stored; without an expert its hole is kept."""
        name = _part_name(row, row.name_at(index, self.running), part, self.format)
        return name if expert is None else name.replace("{expert}", str(expert))

    def refuse_unmatched(self, checkpoint: Checkpoint, model: Model) -> None:
        """Raise CheckpointError for the first tensor that no row claims."""
        if self.unmatched:
            name = checkpoint.names[self.unmatched[0]]
            raise CheckpointError(
                f"{checkpoint.folder}: tensor {name} matches no row of the family {model.family} "
                f"({len(self.unmatched)} such tensors); the conversion would lose it"
            )


def match_names(
    checkpoint: Checkpoint, rows: Sequence[Row], model: Model, format: Format | None, holes: Mapping[str, str]
) -> Names:
    """Give every stored tensor its row; `holes` says which size counts a hole that is neither layer nor expert.

    Raises CheckpointError where two rows claim one name.
    """
    entries: dict[str, Entry] = {}
    for row in rows:
        own = format.of(row.group) if format is not None and row.quant else None
        for part in ("plain", *(own.suffixes() if own is not None else ())):
            name = _part_name(row, row.name, part, format)
            if part == "values" and name == row.name:
                continue  # the plain name serves for both
            entry = entries.setdefault(_HOLE.sub(".#", name), Entry())
            entry.claims.append((row, part, tuple(_HOLE.findall(name))))
    names = Names({}, [], set(), format, len(model.forward_layers))
    for tensor, name in enumerate(checkpoint.names):
        found = entries.get(_NUMBER.sub(".#", name))
        if found is None or _ODD.search(name):
            names.unmatched.append(tensor)
        else:
            found.tensors.append(tensor)
            found.numbers.append(tuple(map(int, _NUMBER.findall(name))))
    for entry in entries.values():
        for tensor, numbers in zip(entry.tensors, entry.numbers, strict=True):
            _assign(names, checkpoint, entry, tensor, numbers, model, holes)
    layered = {id(row) for row in rows if row.section.stage == "layer"}
    names.layers_seen.update(index for row, _, index in names.found if row in layered and index is not None)
    return names


def _assign(
    names: Names,
    checkpoint: Checkpoint,
    entry: Entry,
    tensor: int,
    numbers: tuple[int, ...],
    model: Model,
    counted: Mapping[str, str],
) -> None:
    taken: tuple[Row, str, int | None, int] | None = None
    for row, part, holes in entry.claims:
        index: int | None = None
        expert = 0
        for hole, number in zip(holes, numbers, strict=True):
            if hole in ("{layer}", "{mtp}"):
                index = number + (names.running if hole == "{mtp}" else 0)
                if not _applies(row, model, index):
                    break
            elif hole == "{expert}":
                expert = number
                if expert >= model.sizes.get("experts", 0):
                    break
            elif hole.startswith("{"):
                index = number
                if number >= model.sizes.get(counted[hole[1:-1]], 0):
                    break
            elif int(hole) != number:
                break
        else:
            if row.section.stage == "layer" and index is None:
                index = names.running  # the only layer for multi-token prediction
                if not _applies(row, model, index):
                    continue
            if taken is not None:
                raise CheckpointError(
                    f"tensor {checkpoint.names[tensor]} matches two rows of the family {model.family}: "
                    f"{taken[0].role} and {row.role}"
                )
            taken = (row, part, index, expert)
    if taken is None:
        names.unmatched.append(tensor)
        return
    row, part, index, expert = taken
    names.found.setdefault((id(row), part, index), {})[expert] = tensor


def _applies(row: Row, model: Model, index: int) -> bool:
    return index < len(model.layers) and row.section.applies(model.layers[index].kinds, model.layers[index].mtp)


def _part_name(row: Row, stored: str, part: str, format: Format | None) -> str:
    own = format.of(row.group) if format is not None and part != "plain" else None
    return stored if own is None else own.part_name(stored, part)
