"""A config.json bound to a family: what a checkpoint of it holds, before there is one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from shard_plans.checkpoints.dtypes import DTYPE_BITS
from shard_plans.checkpoints.expected import Alike, Expected
from shard_plans.checkpoints.headers import LARGEST, brief
from shard_plans.errors import ConfigError
from shard_plans.families.binding import Binding, check_blocks, every_row, places
from shard_plans.families.dims import Dim, extent, stored_extent
from shard_plans.families.expressions import MissingKey, first_value
from shard_plans.families.family import Family
from shard_plans.families.formats import Format, config_format
from shard_plans.families.model import MAX_LAYERS, Layer, Model, bind_model, wanted
from shard_plans.families.parameter import Parameter, Part
from shard_plans.families.rows import Row
from shard_plans.families.targets import Targets

MOST_TENSORS = 10_000_000
MOST_BYTES = 1 << 62
"""Of all tensors; what a plan document can state."""
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64", "half": "F16", "float": "F32"}


def bind_config(config: Mapping[str, Any], digest: str, path: Path, family: Family) -> Binding:
    """What the table makes of a config: every parameter with names, shapes and types, as if read from headers.

    `digest` is that of the config.json at `path`. Quantised are the rows flagged `quant` whose module the config's
    quantization_config means (Targets); the scales have the first type that the format lists. Plain rows have the type
    that the row states, else the table's `stored`, else the config's `dtype`. Rows that may be absent count as stored.
    Raises ConfigError where the config lacks a key or describes what can't be, FamilyError as bind_model does.
    """
    model = bind_model(family, config)
    notes: list[str] = []
    rows = every_row(family)
    _check_counts(family, model)
    if any(layer.mtp for layer in model.layers):
        extra = len(model.layers) - len(model.forward_layers)
        notes.append(f"{extra} multi-token-prediction layer(s) count as stored, as config.json announces them")
    for key, what in family.undescribed.items():
        with suppress(MissingKey):
            if count := first_value(key, model.text):
                notes.append(
                    f"config.json: {key} is {count}; the family {family.name} doesn't describe {what}: not counted"
                )
    maker = _Maker(model, _plain_dtype(family, model, notes), family.formats)
    for row, layer, index in places(rows, model, family.holes):
        maker.add(row, layer, index)
    absent = sorted({row.name for row in rows if row.optional and row.name in maker.made})
    if absent:
        notes.append(f"{', '.join(absent)} count as stored; a checkpoint may lack them")
    check_blocks(family, model, maker.parameters)
    expected = Expected(path, config, digest, tuple(maker.runs))
    if expected.total_bytes > MOST_BYTES:
        raise ConfigError(f"{path} describes {expected.total_bytes} bytes of weights; at most {MOST_BYTES} can be")
    return Binding(expected, family, model, tuple(maker.parameters), None, tuple(notes))


class _Maker:
    """Makes parameters one after the other; what doesn't depend on the layer is worked out once a row."""

    def __init__(self, model: Model, plain: str, formats: Sequence[str]) -> None:
        self.model, self.plain = model, plain
        self.format = config_format(model.text, formats)
        self.targets = Targets(model.text.get("quantization_config"))
        self.parameters: list[Parameter] = []
        self.runs: list[Alike] = []
        self.made: set[str] = set()
        self._wanted: dict[int, bool] = {}
        self._rows = 0

    def add(self, row: Row, layer: Layer | None, index: int | None) -> None:
        """The parameter of a row in a layer or block, where the config says that it is stored."""
        if id(row) not in self._wanted:
            counts = not any(dim.unstated for dim in row.dims) and not (row.tied is not None and self.model.tied)
            self._wanted[id(row)] = counts and wanted(row, self.model)
        if not self._wanted[id(row)]:
            return
        self.made.add(row.name)
        name = row.name_at(index, len(self.model.forward_layers))
        format = self.format.of(row.group) if self.format is not None and row.quant else None
        if format is not None and not self._quantised(name):
            format = None
        dims = row.dims[1:] if row.stacked else row.dims
        if row.quant == "swapped" and format is not None:
            dims = (*dims[:-2], dims[-1], dims[-2])
        if format is not None:
            format = format.fitted(extent(dims[-1], self.model.sizes))
        parts = tuple(self._parts(row, name, dims, format))
        facts = None
        if format is not None and format.shape_suffix is not None:
            facts = self._part("shape", name + format.shape_suffix, format.shape_dtypes[0], (2,), (2,), row)
        at, number = (layer.index, None) if layer is not None else (None, index)
        stage = "mtp" if layer is not None and layer.mtp else row.section.stage
        per_expert = row.per_expert or row.stacked
        made = Parameter(row.role, at, number, stage, dims, format, parts, per_expert, facts, row.quant)
        self.parameters.append(made)

    def _quantised(self, name: str) -> bool:
        module = name.removesuffix(".weight")
        before, hole, behind = module.partition(".{expert}")
        if not hole:
            return self.targets.quantises(module)
        said = self.targets.quantises(f"{before}.0{behind}")
        if self.targets.singles_out(before):
            for expert in range(1, self.model.sizes["experts"]):
                if self.targets.quantises(f"{before}.{expert}{behind}") != said:
                    raise ConfigError(
                        f"config.json: quantization_config quantises {before}.{0 if said else expert}{behind} but not "
                        f"{before}.{expert if said else 0}{behind}; experts of a layer must share a type to be stacked"
                    )
        return said

    def _parts(self, row: Row, name: str, dims: tuple[Dim, ...], format: Format | None) -> Iterable[Part]:
        sizes = self.model.sizes
        used = tuple(extent(dim, sizes) for dim in dims)
        if format is None:
            shape = tuple(stored_extent(dim, sizes) for dim in dims)
            yield self._part("values", name, row.dtype or row.usual or self.plain, shape, used, row)
            return
        try:
            values = format.values_shape(used)
        except ValueError as error:
            raise ConfigError(f"config.json: {name} can't be stored as it says: {error}") from None
        scale = format.scale_shape(used)
        yield self._part("values", format.part_name(name, "values"), format.values_dtypes[0], values, values, row)
        yield self._part("scale", format.part_name(name, "scale"), format.scale_dtypes[0], scale, scale, row)
        if format.global_suffix is not None:
            yield self._part("global_scale", name + format.global_suffix, "F32", (1,), (1,), row)

    def _part(self, kind: str, name: str, dtype: str, shape: tuple[int, ...], used: tuple[int, ...], row: Row) -> Part:
        """One stored tensor, one an expert, or the slices of one that stacks the experts."""
        count = self.model.sizes["experts"] if row.per_expert or row.stacked else 1
        stored = (count, *shape) if row.stacked else shape
        if not all(stored) or math.prod(stored) * DTYPE_BITS[dtype] > LARGEST:
            raise ConfigError(
                f"config.json makes the tensor {name} {dtype} {brief(list(stored))}; its bits must be in 1..2^63-1"
            )
        if self._rows + count > MOST_TENSORS:
            raise ConfigError(f"config.json describes more than {MOST_TENSORS} tensors; its counts can't be right")
        numbers = np.arange(self._rows, self._rows + count, dtype=np.int64)
        self.runs.append(Alike(name, 1 if row.stacked else count, dtype, stored))
        self._rows += count
        return Part(kind, name, dtype, shape, used, numbers, row.stacked)


def _check_counts(family: Family, model: Model) -> None:
    """Counts that are walked through must be such that a walk ends."""
    for hole, size in family.holes.items():
        if model.sizes.get(size, 0) > MAX_LAYERS:
            raise ConfigError(f"config.json: {model.sizes[size]} places for {hole}; at most {MAX_LAYERS} are possible")


def _plain_dtype(family: Family, model: Model, notes: list[str]) -> str:
    """The type of plain rows that don't state one."""
    if family.stored is not None:
        return family.stored
    said = model.text.get("dtype", model.text.get("torch_dtype"))
    if said is None:
        notes.append("config.json names no dtype; plain weights count as BF16")
        return "BF16"
    found = _DTYPES.get(said.removeprefix("torch.")) if isinstance(said, str) else None
    if found is None:
        raise ConfigError(f"config.json: dtype is {brief(said)}; known: {', '.join(_DTYPES)}")
    return found
