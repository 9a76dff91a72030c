"""A binding in the precision of a plan: parameters whose group changes get the parts of the target format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shard_plans.errors import PlanError
from shard_plans.families.binding import Binding
from shard_plans.families.formats import storage_format
from shard_plans.families.parameter import Parameter, Part, logical_shape
from shard_plans.families.weights import WeightFormat, formats, group_of

CONVERTIBLE = ("BF16", "F16", "F32")
"""Plain types that can be converted; quantised ones can as far as their format is known."""


def in_precision(binding: Binding, weights: Mapping[str, str]) -> Binding:
    """The binding with every parameter as the plan stores it; what was converted before is taken as it was stored.

    Raises PlanError for a parameter that its group's format can't hold.
    """
    if not weights and not any(parameter.source for parameter in binding.parameters):
        return binding
    known = formats()
    parameters = []
    for parameter in binding.parameters:
        stored = parameter.source or parameter
        name = weights.get(group_of(stored.role, bool(stored.quant)) or "")
        parameters.append(stored if name is None else _converted(stored, known[name]))
    return replace(binding, parameters=tuple(parameters))


def _converted(stored: Parameter, target: WeightFormat) -> Parameter:
    """The parameter in the target format; itself where it is stored so already."""
    values = stored.parts[0]
    if stored.format is None and values.dtype not in CONVERTIBLE:
        raise PlanError(
            f"{values.pattern} is stored as {values.dtype}, which can't be converted to {target.name}; "
            f"leave its group as stored"
        )
    shape, dims = logical_shape(stored), stored.dims
    if stored.quant == "swapped" and (stored.format is None) != (target.format is None):
        shape, dims = (*shape[:-2], shape[-1], shape[-2]), (*dims[:-2], dims[-1], dims[-2])
    stem = values.pattern.removesuffix(stored.format.values_suffix if stored.format is not None else "")
    if target.format is None:
        if stored.format is None and values.dtype == target.values:
            return stored
        parts = [replace(values, pattern=stem, dtype=target.values, shape=shape, used=shape)]
        return replace(stored, dims=dims, format=None, parts=tuple(parts), source=stored)
    if len(shape) != 2:
        raise PlanError(
            f"{values.pattern} has {len(shape)} dimensions, {target.name} keeps matrices; leave its group as stored"
        )
    format = storage_format(target.format, target.block or (1, shape[1]))
    dtypes = (target.values, target.scale)
    if stored.format == format and tuple(part.dtype for part in stored.parts[:2]) == dtypes:
        return stored
    try:
        elements = format.values_shape(shape)
    except ValueError as error:
        raise PlanError(f"{values.pattern} can't be stored as {target.name}: {error}") from None
    made = {"values": (target.values, elements), "scale": (target.scale or "", format.scale_shape(shape))}
    if format.global_suffix is not None:
        made["global_scale"] = ("F32", (1,))
    suffixes = format.suffixes()
    new = [
        Part(kind, stem + suffixes[kind], dtype, size, size, values.tensors, values.stacked)
        for kind, (dtype, size) in made.items()
    ]
    return replace(stored, dims=dims, format=format, parts=tuple(new), source=stored)
