"""Quantised storage formats: which stored tensors make one parameter, and how many values share a scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from shard_plans.documents.yaml_text import load_yaml
from shard_plans.errors import ConfigError
from shard_plans.families.expressions import MissingKey, evaluate

_FILE = Path(__file__).parent / "tables" / "_formats.yaml"

PLAIN_DTYPES = ("BF16", "F16", "F32", "F64")
"""What a parameter without a quantised format may be stored in."""
ROW = (1, 0)
"""A block of one whole row, whatever its length."""


@dataclass(frozen=True, slots=True)
class Format:
    """A quantised format as one config uses it."""

    name: str
    block: tuple[int, int]
    """Rows and columns of values that share one scale; no columns (0): a whole row does, see `fitted`."""
    values_suffix: str
    """Behind the row's name; empty where the values take the name of the plain tensor."""
    values_dtypes: tuple[str, ...]
    pack: int
    """Values in one stored element, along the columns."""
    scale_suffix: str
    scale_dtypes: tuple[str, ...]
    fold: int = 1
    """Stored elements of the values that make the last dimension, where the columns are stored in two."""
    shape_suffix: str | None = None
    """Of a stored tensor that repeats the rows and columns of the values; None where there is none."""
    shape_dtypes: tuple[str, ...] = ()
    global_suffix: str | None = None
    """Of one more scale for the whole matrix, F32 [1], by which the others are divided; None where there is none."""
    replaced: str = ""
    """End of the row's name in whose place the suffix of the scale stands."""
    groups: tuple[str, ...] = ()
    """Groups of roles that are stored so; none named: all."""
    experts: Format | None = None
    """How routed experts are stored, where that is otherwise."""

    def of(self, group: str) -> Format | None:
        """How the rows of a group of roles are stored; None where they stay plain."""
        if group == "experts" and self.experts is not None:
            return self.experts
        return self if not self.groups or group in self.groups else None

    def part_name(self, stored: str, part: str) -> str:
        """The name of a part of the row that is called `stored` where it is plain."""
        stem = stored.removesuffix(self.replaced) if part == "scale" else stored
        return stem + self.suffixes()[part]

    def fitted(self, columns: int) -> Format:
        """The format for values of so many columns: a scale for each row spans them all."""
        return self if self.block[1] else replace(self, block=(self.block[0], columns))

    def suffixes(self) -> dict[str, str]:
        """Part of a parameter -> what stands behind its name."""
        shape = {} if self.shape_suffix is None else {"shape": self.shape_suffix}
        whole = {} if self.global_suffix is None else {"global_scale": self.global_suffix}
        return {"values": self.values_suffix, "scale": self.scale_suffix, **whole, **shape}

    def values_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """How values of this shape are stored. ValueError where a stored element would be left half full."""
        whole = self.pack * self.fold
        if shape[-1] % whole:
            raise ValueError(f"{self.name} keeps {whole} values together, and {shape[-1]} columns aren't whole ones")
        return (*shape[:-1], shape[-1] // whole, *((self.fold,) if self.fold > 1 else ()))

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the scales of values of this shape."""
        tall, wide = self.block
        return (*shape[:-2], -(-shape[-2] // tall), -(-shape[-1] // wide))


@cache
def _formats() -> dict[str, Any]:
    data, _ = load_yaml(_FILE, "storage formats")
    return dict(data)


def format_names() -> list[str]:
    """All that the table knows."""
    return list(_formats())


def column_steps(name: str) -> tuple[int, ...]:
    """How many values along the columns an element spans, in each stored dimension that columns are kept in.

    `(8,)` for words of eight values, `(32, 2)` where they are stored as [blocks of 32, bytes of 2].
    """
    values = _formats().get(name, {}).get("values", {})
    pack, fold = int(values.get("pack", 1)), int(values.get("fold", 1))
    return (pack * fold, pack) if fold > 1 else (pack,)


def storage_format(name: str, block: tuple[int, int]) -> Format:
    """The format `name` of the table, with blocks of this size."""
    entry = _formats()[name]
    values, scale, shape, whole = entry["values"], entry["scale"], entry.get("shape", {}), entry.get("global", {})
    return Format(
        name, block, values["suffix"], tuple(values["dtype"]), int(values.get("pack", 1)), scale["suffix"],
        tuple(scale["dtype"]), int(values.get("fold", 1)), shape.get("suffix"), tuple(shape.get("dtype", ())),
        whole.get("suffix"), scale.get("replaces", ""), tuple(entry.get("groups", ())),
    )  # fmt: skip


def config_format(config: Mapping[str, Any], names: Sequence[str] = ()) -> Format | None:
    """The format that config.quantization_config names; None where there is no such section.

    `names`: the only ones that the family's table takes; without them all that no table has to name. Raises ConfigError
    where the section names a format that isn't known, or its block sizes make no sense.
    """
    if config.get("quantization_config") is None:
        return None
    known = names or [name for name, entry in _formats().items() if not entry.get("by_table")]
    for name in known:
        entry = _formats()[name]
        try:
            if not evaluate(entry["when"], config):
                continue
        except MissingKey:
            continue
        try:
            block = list(ROW) if entry["block"] == "row" else evaluate(entry["block"], config)
        except MissingKey as missing:
            raise ConfigError(
                f"config.json: quantization_config is {name} without its block size: {missing}"
            ) from missing
        sizes = isinstance(block, list) and len(block) == 2 and all(type(n) is int and 0 < n < 1 << 20 for n in block)
        if not sizes and block != list(ROW):
            raise ConfigError(f"config.json: quantisation block size {block!r}; two whole numbers above 0 are wanted")
        experts = config_format(config, [entry["experts"]]) if _holds(entry.get("experts"), config) else None
        return replace(storage_format(name, (block[0], block[1])), experts=experts)
    section = config["quantization_config"]
    words = [section.get(key) for key in ("quant_method", "format")] if isinstance(section, dict) else [section]
    word = " ".join(str(word) for word in words if word is not None)
    raise ConfigError(f"config.json: quantization_config {word!r} is an unknown format; known: {', '.join(known)}")


def _holds(name: str | None, config: Mapping[str, Any]) -> bool:
    try:
        return name is not None and bool(evaluate(_formats()[name]["when"], config))
    except MissingKey:
        return False
