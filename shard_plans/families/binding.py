"""A checkpoint bound to a family: every stored tensor belongs to exactly one row of the table."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from shard_plans.checkpoints.checkpoint import Checkpoint
from shard_plans.checkpoints.dtypes import DTYPE_BITS
from shard_plans.errors import CheckpointError
from shard_plans.families.dims import Dim, extent
from shard_plans.families.expressions import MissingKey, evaluate
from shard_plans.families.family import Family
from shard_plans.families.formats import PLAIN_DTYPES, Format, config_format
from shard_plans.families.model import Layer, Model, bind_model
from shard_plans.families.names import Names, match_names
from shard_plans.families.rows import Row, bias_row
from shard_plans.families.vocabulary import check_roles

Numbers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Part:
    """One stored tensor of a parameter, or one an expert: its values or its scales."""

    kind: str
    """values or scale."""
    pattern: str
    """Stored name; `{expert}` is kept."""
    dtype: str
    shape: tuple[int, ...]
    tensors: Numbers = field(compare=False, repr=False)
    """Numbers of the stored tensors in the checkpoint: one an expert in order, or one."""

    @property
    def nbytes(self) -> int:
        """Payload bytes of all its stored tensors."""
        return len(self.tensors) * math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True, slots=True)
class Parameter:
    """One logical weight with its scales (or one an expert): cut as a whole."""

    role: str
    layer: int | None
    stage: str
    """first, layer, last or mtp: where the family's section puts it."""
    dims: tuple[Dim, ...]
    format: str | None
    block: tuple[int, int] | None
    """Rows and columns that share a scale, as stored."""
    parts: tuple[Part, ...]
    per_expert: bool

    @property
    def group(self) -> str:
        """The role's first word: attn, mlp, experts, ..."""
        return self.role.partition(".")[0]


@dataclass(frozen=True, slots=True, eq=False)
class Binding:
    """Every parameter of a checkpoint, in execution order."""

    checkpoint: Checkpoint
    family: Family
    model: Model
    parameters: tuple[Parameter, ...]
    doubled: tuple[int, int] | None
    """Embedding and head where both are stored though config.json says tied: their bytes must be equal."""
    notes: tuple[str, ...]
    """What the binding decided, as sentences for the user."""


def bind(checkpoint: Checkpoint, family: Family) -> Binding:
    """Match every stored tensor to one row and check its shape and type.

    Raises CheckpointError naming the first tensor that is unknown, missing, or of another shape or type than the
    config says; ConfigError and FamilyError as bind_model does.
    """
    model = bind_model(family, checkpoint.config)
    format = config_format(checkpoint.config)
    rows = [r for row in family.rows for r in ((row, bias_row(row)) if row.bias else (row,))]
    names = match_names(checkpoint, rows, model, format)
    notes: list[str] = []
    model = _announced_mtp(model, names, notes)
    parameters: list[Parameter] = []
    for row, layer in _places(rows, model):
        parameter = _parameter(checkpoint, names, row, layer, model, format)
        if parameter is not None:
            parameters.append(parameter)
    names.refuse_unmatched(checkpoint, model)
    by_role = {p.role: p for p in parameters if p.layer is None}
    doubled = None
    said = checkpoint.config.get("tie_word_embeddings")
    if "head" in by_role and said:
        doubled = (int(by_role["embed"].parts[0].tensors[0]), int(by_role["head"].parts[0].tensors[0]))
        notes.append("embedding and head are both stored though config.json ties them; convert compares their bytes")
    if "head" not in by_role and said is False:
        raise CheckpointError(f"{checkpoint.folder}: {_head_name(rows)} is missing, and config.json says it isn't tied")
    for layer in model.layers:
        here = [p.role for p in parameters if p.layer == layer.index]
        check_roles({**model.words, **layer.words}, here, family.name, f"layer {layer.index}")
    model = replace(model, tied="head" not in by_role)
    return Binding(checkpoint, family, model, tuple(parameters), doubled, tuple(notes))


def _head_name(rows: list[Row]) -> str:
    return next(row.name for row in rows if row.role == "head")


def _announced_mtp(model: Model, names: Names, notes: list[str]) -> Model:
    """A config may announce MTP layers that were never stored; all of them or none must be there."""
    mtp = [layer.index for layer in model.layers if layer.mtp]
    if not mtp or names.layers_seen.intersection(mtp):
        return model
    notes.append(f"config.json announces {len(mtp)} multi-token-prediction layer(s), none is stored")
    return replace(model, layers=model.forward_layers)


def _places(rows: list[Row], model: Model) -> Iterator[tuple[Row, Layer | None]]:
    """Rows with the layers they apply to, in execution order."""
    for row in rows:
        if row.section.stage == "first":
            yield row, None
    for layer in model.layers:
        for row in rows:
            if row.section.stage == "layer" and row.section.applies(dict(layer.kinds), layer.mtp):
                yield row, layer
    for row in rows:
        if row.section.stage == "last":
            yield row, None


def _wanted(row: Row, model: Model) -> bool:
    if row.condition is None:
        return True
    try:
        return bool(evaluate(row.condition, model.config, dict(model.sizes)))
    except MissingKey:
        return False  # a key that isn't there is a feature that isn't there


def _parameter(
    checkpoint: Checkpoint, names: Names, row: Row, layer: Layer | None, model: Model, format: Format | None
) -> Parameter | None:
    """The parameter of a row in a layer; None where the table allows that it isn't stored."""
    index = layer.index if layer is not None else None
    where = row.name.replace("{layer}", str(index))
    values = names.take(row, "values", index, model)
    scale = names.take(row, "scale", index, model)
    wanted = _wanted(row, model)
    if values is None:
        if scale is not None or (wanted and not row.optional and row.tied is None):
            missing = names.stored_name(row, "values", index)
            raise CheckpointError(f"{checkpoint.folder}: tensor {missing} is missing; {_because(row, model)}")
        return None
    if not wanted:
        raise CheckpointError(
            f"{checkpoint.folder}: tensor {where} is stored, but by config.json it must not be ({row.condition})"
        )
    if scale is None and format is not None and row.quant:
        _refuse_lost_scale(checkpoint, names, row, index, values, format)
    shape = tuple(extent(dim, model.sizes) for dim in row.dims)
    stage = "mtp" if layer is not None and layer.mtp else row.section.stage
    parts = [
        _part(checkpoint, "values", where, values, shape, _value_dtypes(row, format if scale is not None else None))
    ]
    block = None
    if scale is not None:
        assert format is not None
        block = format.block
        grid = (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))
        parts.append(_part(checkpoint, "scale", where + format.scale_suffix, scale, grid, format.scale_dtypes))
    return Parameter(
        row.role, index, stage, row.dims, format.name if format is not None and scale is not None else None, block,
        tuple(parts), row.per_expert,
    )  # fmt: skip


def _refuse_lost_scale(
    checkpoint: Checkpoint, names: Names, row: Row, index: int | None, values: Numbers, format: Format
) -> None:
    dtype = checkpoint.dtypes[int(values[0])]
    if dtype in format.values_dtypes:
        raise CheckpointError(
            f"{checkpoint.folder}: tensor {names.stored_name(row, 'scale', index)} is missing: "
            f"{names.stored_name(row, 'values', index)} is stored as {dtype}, which means nothing without its scale"
        )


def _because(row: Row, model: Model) -> str:
    return f"the family {model.family} stores it as {row.role} [{', '.join(dim.text for dim in row.dims)}]"


def _value_dtypes(row: Row, format: Format | None) -> tuple[str, ...]:
    if format is not None:
        return format.values_dtypes
    return (row.dtype,) if row.dtype is not None else PLAIN_DTYPES


def _part(
    checkpoint: Checkpoint, kind: str, pattern: str, tensors: Numbers, shape: tuple[int, ...], dtypes: tuple[str, ...]
) -> Part:
    """Check the stored tensors of a part against the formula; all experts must share one type."""
    dtype = checkpoint.dtypes[int(tensors[0])]
    for number in tensors.tolist():
        name = checkpoint.names[number]
        if checkpoint.shapes[number] != shape:
            raise CheckpointError(
                f"{checkpoint.folder}: tensor {name} has shape {list(checkpoint.shapes[number])}, "
                f"config.json makes it {list(shape)}"
            )
        if checkpoint.dtypes[number] not in dtypes:
            raise CheckpointError(
                f"{checkpoint.folder}: tensor {name} is stored as {checkpoint.dtypes[number]}, "
                f"allowed: {', '.join(dtypes)}"
            )
        if checkpoint.dtypes[number] != dtype:
            raise CheckpointError(
                f"{checkpoint.folder}: tensor {name} is stored as {checkpoint.dtypes[number]}, "
                f"{checkpoint.names[int(tensors[0])]} as {dtype}; experts of one layer must share a type to be stacked"
            )
    return Part(kind, pattern, dtype, shape, tensors)
