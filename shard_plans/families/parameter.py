"""One logical weight with its scales: which stored tensors make it, checked against the table's formula."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from shard_plans.checkpoints.checkpoint import Checkpoint
from shard_plans.checkpoints.dtypes import DTYPE_BITS
from shard_plans.checkpoints.headers import brief
from shard_plans.errors import CheckpointError
from shard_plans.families.dims import Dim, extent, settled
from shard_plans.families.formats import Format
from shard_plans.families.model import Layer, Model, wanted
from shard_plans.families.names import Names
from shard_plans.families.rows import Row

Numbers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Part:
    """One stored tensor of a parameter, or one an expert: its values or its scales."""

    kind: str
    """values, scale, global_scale or shape."""
    pattern: str
    """Stored name; `{expert}` is kept."""
    dtype: str
    shape: tuple[int, ...]
    """As stored."""
    used: tuple[int, ...]
    """What of it means something: shorter than `shape` where a dimension ends in a tail of zeros."""
    tensors: Numbers = field(compare=False, repr=False)
    """Rows of the checkpoint: one tensor, or one an expert in order; or the slices of one tensor that stacks them."""
    stacked: bool = False
    """Whether one stored tensor holds all experts."""

    @property
    def stored(self) -> int:
        """Stored tensors."""
        return 1 if self.stacked else len(self.tensors)

    @property
    def nbytes(self) -> int:
        """Payload bytes of all its stored tensors."""
        return len(self.tensors) * math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True, slots=True)
class Parameter:
    """One logical weight with its scales (or one an expert): cut as a whole."""

    role: str
    layer: int | None
    number: int | None
    """Which block of a tower it belongs to; None outside towers, and where there is one only."""
    stage: str
    """first, vision, layer, last or mtp: where the family's section puts it."""
    dims: tuple[Dim, ...]
    format: Format | None
    """Quantised format; None where the values are plain."""
    parts: tuple[Part, ...]
    per_expert: bool
    shape: Part | None = None
    """Stored tensors that only repeat the rows and columns of the values, where the format has such."""
    quant: bool | str = False
    """Whether its row may be stored quantised; `swapped`: with rows and columns exchanged then."""
    source: Parameter | None = None
    """What is stored, where the plan stores it in another precision (placement/precision.py)."""

    @property
    def all_parts(self) -> tuple[Part, ...]:
        """Its parts, and what only repeats their shape."""
        return self.parts if self.shape is None else (*self.parts, self.shape)

    @property
    def block(self) -> tuple[int, int] | None:
        """Rows and columns that share a scale, as stored."""
        return self.format.block if self.format is not None else None

    @property
    def group(self) -> str:
        """The role's first word: attn, mlp, experts, ..."""
        return self.role.partition(".")[0]


def logical_shape(parameter: Parameter) -> tuple[int, ...]:
    """The shape of the values as numbers, whatever is packed in one stored element."""
    shape, format = parameter.parts[0].shape, parameter.format
    if format is None:
        return shape
    folded = shape[:-1] if format.fold > 1 else shape
    return (*folded[:-1], folded[-1] * format.pack * format.fold)


@dataclass(frozen=True, slots=True)
class StoredAs:
    """What decides how rows may be stored."""

    model: Model
    format: Format | None
    plain: tuple[str, ...]
    """Types of plain rows that don't state one."""


def make_parameter(
    checkpoint: Checkpoint, names: Names, row: Row, layer: Layer | None, index: int | None, context: StoredAs
) -> Parameter | None:
    """The parameter of a row in a layer or block; None where the table allows that it isn't stored."""
    model = context.model
    format = context.format.of(row.group) if context.format is not None and row.quant else None
    plain = names.take(row, "plain", index, model)
    packed = names.take(row, "values", index, model) if format is not None and format.values_suffix else None
    scale = names.take(row, "scale", index, model) if format is not None else None
    if plain is not None and packed is not None:
        raise CheckpointError(
            f"{checkpoint.folder}: tensors {names.stored_name(row, 'plain', index)} and "
            f"{names.stored_name(row, 'values', index)} are both stored; one of them must go"
        )
    values = plain if packed is None else packed
    if values is None:
        if scale is not None or (wanted(row, model) and not row.optional and row.tied is None):
            kind = "values" if scale is not None and format is not None and format.values_suffix else "plain"
            missing = names.stored_name(row, kind, index)
            raise CheckpointError(f"{checkpoint.folder}: tensor {missing} is missing; {_because(row, model)}")
        return None
    where = names.stored_name(row, "plain" if packed is None else "values", index, None)
    if not wanted(row, model):
        condition = row.condition or row.section.condition
        raise CheckpointError(
            f"{checkpoint.folder}: tensor {where} is stored, but by config.json it must not be ({condition})"
        )
    if scale is None and format is not None:
        _refuse_lost_scale(checkpoint, names, row, index, values, format)
    dims = row.dims[1:] if row.stacked else row.dims
    found = checkpoint.shapes[int(values[0])]
    if len(found) == len(dims):
        dims = tuple(settled(dim, length) for dim, length in zip(dims, found, strict=True))
    shape, facts = _stored_shape(checkpoint, dims, values, model), None
    if scale is None or format is None:
        plain_types = (row.dtype,) if row.dtype is not None else context.plain
        used = tuple(extent(dim, model.sizes) for dim in dims)
        parts, format = [_part(checkpoint, "values", where, values, shape, plain_types, used)], None
    else:
        if row.quant == "swapped":
            shape, dims = (*shape[:-2], shape[-1], shape[-2]), (*dims[:-2], dims[-1], dims[-2])
        format = format.fitted(shape[-1])
        try:
            elements = format.values_shape(shape)
        except ValueError as error:
            raise CheckpointError(
                f"{checkpoint.folder}: {where} can't be stored as config.json says: {error}"
            ) from None
        parts = [_part(checkpoint, "values", where, values, elements, format.values_dtypes)]
        name = names.stored_name(row, "scale", index, None)
        parts.append(_part(checkpoint, "scale", name, scale, format.scale_shape(shape), format.scale_dtypes))
        if format.global_suffix is not None:
            parts.append(_beside(checkpoint, names, row, index, model, format, "global_scale", (1,), ("F32",)))
        if format.shape_suffix is not None:
            facts = _beside(checkpoint, names, row, index, model, format, "shape", (2,), format.shape_dtypes)
    if row.stacked:
        parts = [replace(part, stacked=True) for part in parts]
    at, number = (layer.index, None) if layer is not None else (None, index)
    stage = "mtp" if layer is not None and layer.mtp else row.section.stage
    per_expert = row.per_expert or row.stacked
    return Parameter(row.role, at, number, stage, dims, format, tuple(parts), per_expert, facts, row.quant)


def _beside(
    checkpoint: Checkpoint, names: Names, row: Row, index: int | None, model: Model, format: Format, kind: str,
    shape: tuple[int, ...], dtypes: tuple[str, ...],
) -> Part:  # fmt: skip
    """A small part that the format stores beside values and scales: how large the values are, or one more scale."""
    found = names.take(row, kind, index, model)
    if found is None:
        raise CheckpointError(
            f"{checkpoint.folder}: tensor {names.stored_name(row, kind, index)} is missing; "
            f"the format {format.name} stores it beside the values"
        )
    return _part(checkpoint, kind, names.stored_name(row, kind, index, None), found, shape, dtypes)


def _stored_shape(checkpoint: Checkpoint, dims: tuple[Dim, ...], values: Numbers, model: Model) -> tuple[int, ...]:
    """The shape that config.json makes; a dimension with a tail of zeros is as long as the header says."""
    shape = [extent(dim, model.sizes) for dim in dims]
    found = checkpoint.shapes[int(values[0])]
    for axis, dim in enumerate(dims):
        if dim.zeros and len(found) == len(shape):
            shape[axis] = max(shape[axis], found[axis])
    return tuple(shape)


def _refuse_lost_scale(
    checkpoint: Checkpoint, names: Names, row: Row, index: int | None, values: Numbers, format: Format
) -> None:
    dtype = checkpoint.dtypes[int(values[0])]
    if dtype in format.values_dtypes:
        kind = "values" if format.values_suffix else "plain"
        raise CheckpointError(
            f"{checkpoint.folder}: tensor {names.stored_name(row, 'scale', index)} is missing: "
            f"{names.stored_name(row, kind, index)} is stored as {dtype}, which means nothing without its scale"
        )


def _because(row: Row, model: Model) -> str:
    return f"the family {model.family} stores it as {row.role} [{', '.join(dim.text for dim in row.dims)}]"


def _part(
    checkpoint: Checkpoint,
    kind: str,
    pattern: str,
    tensors: Numbers,
    shape: tuple[int, ...],
    dtypes: tuple[str, ...],
    used: tuple[int, ...] | None = None,
) -> Part:
    """Check the stored tensors of a part against the formula; all experts must share one type."""
    dtype = checkpoint.dtypes[int(tensors[0])]
    for number in tensors.tolist():
        name = checkpoint.label(number)
        if checkpoint.shapes[number] != shape:
            raise CheckpointError(
                f"{checkpoint.folder}: tensor {name} has shape {brief(list(checkpoint.shapes[number]))}, "
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
                f"{checkpoint.label(int(tensors[0]))} as {dtype}; experts of one layer must share a type to be stacked"
            )
    return Part(kind, pattern, dtype, shape, used if used is not None else shape, tensors)
