"""A binding as it would be with its routed experts stored in another format: shapes and sizes, nothing on a disk."""

from __future__ import annotations

from dataclasses import replace

from shard_plans.families.binding import Binding
from shard_plans.families.dims import extent
from shard_plans.families.formats import Format
from shard_plans.families.parameter import Parameter, Part

FORMATS = {
    "fp8": Format("fp8_block", (128, 128), "", ("F8_E4M3",), 1, "_scale_inv", ("F32",)),
    "mxfp4": Format("mxfp4_group", (1, 32), "_packed", ("U8",), 2, "_scale", ("U8",)),
    "bf16": None,
}
"""What routed experts may be stored in: E4M3 with an fp32 scale for 128 x 128, E2M1 with an exponent for 32, plain."""


def with_experts_in(binding: Binding, name: str) -> Binding:
    """The binding with every routed expert in one of FORMATS; everything else stays as it is stored."""
    format = FORMATS[name]
    made: dict[object, tuple[Part, ...]] = {}

    def stored(parameter: Parameter) -> Parameter:
        if not parameter.per_expert or len(parameter.dims) < 2:
            return parameter
        rows, columns = (extent(dim, binding.model.sizes) for dim in parameter.dims[-2:])
        if format is not None and columns % max(format.pack, 1):
            return parameter
        old = parameter.parts[0]
        key = (old.pattern, rows, columns, len(old.tensors))
        if key not in made:
            made[key] = _parts(old, rows, columns, format)
        return replace(parameter, format=format, parts=made[key])

    return replace(binding, parameters=tuple(map(stored, binding.parameters)))


def _parts(old: Part, rows: int, columns: int, format: Format | None) -> tuple[Part, ...]:
    if format is None:
        shape = (rows, columns)
        return (replace(old, dtype="BF16", shape=shape, used=shape),)
    packed = (rows, columns // format.pack)
    grid = (-(-rows // format.block[0]), -(-columns // format.block[1]))
    return (
        replace(old, dtype=format.values_dtypes[0], shape=packed, used=packed),
        replace(old, kind="scale", dtype=format.scale_dtypes[0], shape=grid, used=grid),
    )
