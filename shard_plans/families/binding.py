"""A checkpoint bound to a family: every stored tensor belongs to exactly one row of the table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shard_plans.checkpoints.checkpoint import Checkpoint
from shard_plans.checkpoints.expected import Expected
from shard_plans.checkpoints.headers import brief
from shard_plans.checkpoints.slices import sliced
from shard_plans.errors import CheckpointError
from shard_plans.families.family import Family
from shard_plans.families.formats import PLAIN_DTYPES, config_format
from shard_plans.families.model import Layer, Model, bind_model
from shard_plans.families.names import Names, match_names
from shard_plans.families.parameter import Parameter, StoredAs, make_parameter
from shard_plans.families.rows import Row, bias_row
from shard_plans.families.vocabulary import check_roles

Numbers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True, eq=False)
class Binding:
    """Every parameter of a checkpoint, or of what a config.json announces, in execution order."""

    source: Checkpoint | Expected
    """Where they are from; both have the same columns."""
    family: Family
    model: Model
    parameters: tuple[Parameter, ...]
    doubled: tuple[int, int] | None
    """Embedding and head where both are stored though config.json says tied: their bytes must be equal."""
    notes: tuple[str, ...]
    """What the binding decided, as sentences for the user."""

    @property
    def alone(self) -> bool:
        """Whether there is only a config.json, and no weights."""
        return isinstance(self.source, Expected)

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint; CheckpointError where there is only a config.json."""
        if isinstance(self.source, Expected):
            raise CheckpointError(f"{self.source.folder} is a config.json alone; the weights are wanted too")
        return self.source


def bind(checkpoint: Checkpoint, family: Family) -> Binding:
    """Match every stored tensor to one row and check its shape and type.

    Raises CheckpointError naming the first tensor that is unknown, missing, or of another shape or type than the
    config says; ConfigError and FamilyError as bind_model does.
    """
    model = bind_model(family, checkpoint.config)
    format = config_format(model.text, family.formats)
    stored_as = StoredAs(model, format, (family.stored,) if family.stored else PLAIN_DTYPES)
    rows = every_row(family)
    names = match_names(checkpoint, rows, model, format, family.holes)
    notes: list[str] = []
    model = _announced_mtp(model, names, notes)
    parameters: list[Parameter] = []
    checkpoint = _sliced(checkpoint, rows, names, model)
    for row, layer, index in places(rows, model, family.holes):
        parameter = make_parameter(checkpoint, names, row, layer, index, stored_as)
        if parameter is not None:
            parameters.append(parameter)
    names.refuse_unmatched(checkpoint, model)
    by_role = {p.role: p for p in parameters if p.layer is None and p.number is None}
    doubled = None
    tied = bool(model.text.get("tie_word_embeddings"))  # absent: not tied, the default of all these families
    if "head" in by_role and tied:
        doubled = (int(by_role["embed"].parts[0].tensors[0]), int(by_role["head"].parts[0].tensors[0]))
        notes.append("embedding and head are both stored though config.json ties them; convert compares their bytes")
    if "head" not in by_role and not tied:
        raise CheckpointError(
            f"{checkpoint.folder}: {_head_name(rows)} is missing, and config.json doesn't say that it is tied "
            f"(tie_word_embeddings: true)"
        )
    check_blocks(family, model, parameters)
    model = replace(model, tied="head" not in by_role)
    return Binding(checkpoint, family, model, tuple(parameters), doubled, tuple(notes))


def _sliced(checkpoint: Checkpoint, rows: list[Row], names: Names, model: Model) -> Checkpoint:
    """Tensors that stack experts get a row for each expert, which stands in `names` from then on."""
    stacks = names.stacks(rows)
    for number in stacks.values():
        shape, experts = checkpoint.shapes[number], model.sizes["experts"]
        if not shape or shape[0] != experts:
            raise CheckpointError(
                f"{checkpoint.folder}: tensor {checkpoint.names[number]} has shape {brief(list(shape))}, "
                f"config.json makes it {experts} experts"
            )
    checkpoint, slices = sliced(checkpoint, sorted(stacks.values()))
    names.found.update({key: dict(enumerate(slices[number])) for key, number in stacks.items()})
    return checkpoint


def every_row(family: Family) -> list[Row]:
    """The table's rows, and those of the biases that they announce."""
    return [r for row in family.rows for r in ((row, bias_row(row)) if row.bias else (row,))]


def check_blocks(family: Family, model: Model, parameters: Iterable[Parameter]) -> None:
    """Raise FamilyError where a layer's blocks lack a role that they read, or leave one unread."""
    roles: dict[int | None, list[str]] = {}
    for parameter in parameters:
        roles.setdefault(parameter.layer, []).append(parameter.role)
    for layer in model.layers:
        words = {**model.words, **layer.words}
        check_roles(words, roles.get(layer.index, ()), family.name, f"layer {layer.index}")


def _head_name(rows: list[Row]) -> str:
    return next(row.name for row in rows if row.role == "head")


def _announced_mtp(model: Model, names: Names, notes: list[str]) -> Model:
    """A config may announce MTP layers that were never stored; all of them or none must be there."""
    mtp = [layer.index for layer in model.layers if layer.mtp]
    if not mtp or names.layers_seen.intersection(mtp):
        return model
    notes.append(f"config.json announces {len(mtp)} multi-token-prediction layer(s), none is stored")
    return replace(model, layers=model.forward_layers)


def places(rows: list[Row], model: Model, holes: Mapping[str, str]) -> Iterator[tuple[Row, Layer | None, int | None]]:
    """Rows with the layer, or the number of the layer or of the tower's block, in execution order."""
    for stage in ("first", "vision"):
        for row in rows:
            if row.section.stage == stage:
                blocks: Iterable[int | None] = range(model.sizes.get(holes[row.hole], 0)) if row.hole else (None,)
                yield from ((row, None, block) for block in blocks)
    for layer in model.layers:
        for row in rows:
            if row.section.stage == "layer" and row.section.applies(layer.kinds, layer.mtp):
                yield row, layer, layer.index
    for row in rows:
        if row.section.stage == "last":
            yield row, None, None
