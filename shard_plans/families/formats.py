"""Quantised storage formats: which stored tensors make one parameter, and how many values share a scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from shard_plans.documents.yaml_text import load_yaml
from shard_plans.errors import ConfigError
from shard_plans.families.expressions import MissingKey, evaluate

_FILE = Path(__file__).parent / "tables" / "_formats.yaml"

PLAIN_DTYPES = ("BF16", "F16", "F32", "F64")
"""What a parameter without a quantised format may be stored in."""


@dataclass(frozen=True, slots=True)
class Format:
    """A quantised format as one config uses it."""

    name: str
    block: tuple[int, int]
    """Rows and columns of values that share one scale."""
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

    def suffixes(self) -> dict[str, str]:
        """Part of a parameter -> what stands behind its name."""
        shape = {} if self.shape_suffix is None else {"shape": self.shape_suffix}
        return {"values": self.values_suffix, "scale": self.scale_suffix, **shape}

    def values_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """How values of this shape are stored. ValueError where a stored element would be left half full."""
        whole = self.pack * self.fold
        if shape[-1] % whole:
            raise ValueError(f"{self.name} keeps {whole} values together, and {shape[-1]} columns aren't whole ones")
        return (*shape[:-1], shape[-1] // whole, *((self.fold,) if self.fold > 1 else ()))

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the scales of values of this shape."""
        return (*shape[:-2], -(-shape[-2] // self.block[0]), -(-shape[-1] // self.block[1]))


@cache
def _formats() -> dict[str, Any]:
    data, _ = load_yaml(_FILE, "storage formats")
    return dict(data)


def column_steps(name: str) -> tuple[int, ...]:
    """How many values along the columns an element spans, in each stored dimension that columns are kept in.

    `(8,)` for words of eight values, `(32, 2)` where they are stored as [blocks of 32, bytes of 2].
    """
    values = _formats().get(name, {}).get("values", {})
    pack, fold = int(values.get("pack", 1)), int(values.get("fold", 1))
    return (pack * fold, pack) if fold > 1 else (pack,)


def config_format(config: Mapping[str, Any]) -> Format | None:
    """The format that config.quantization_config names; None where there is no such section.

    Raises ConfigError where the section names a format that isn't known, or its block sizes make no sense.
    """
    if config.get("quantization_config") is None:
        return None
    for name, entry in _formats().items():
        try:
            if not evaluate(entry["when"], config):
                continue
            block = evaluate(entry["block"], config)
        except MissingKey as missing:
            if "block" in str(missing) or "group" in str(missing):
                raise ConfigError(
                    f"config.json: quantization_config is {name} without its block size: {missing}"
                ) from missing
            continue
        if not (isinstance(block, list) and len(block) == 2 and all(type(n) is int and 0 < n < 1 << 20 for n in block)):
            raise ConfigError(f"config.json: quantisation block size {block!r}; two whole numbers above 0 are wanted")
        values, scale, shape = entry["values"], entry["scale"], entry.get("shape", {})
        return Format(
            name, (block[0], block[1]), values["suffix"], tuple(values["dtype"]), int(values.get("pack", 1)),
            scale["suffix"], tuple(scale["dtype"]), int(values.get("fold", 1)), shape.get("suffix"),
            tuple(shape.get("dtype", ())),
        )  # fmt: skip
    section = config["quantization_config"]
    words = [section.get(key) for key in ("quant_method", "format")] if isinstance(section, dict) else [section]
    word = " ".join(str(word) for word in words if word is not None)
    raise ConfigError(f"config.json: quantization_config {word!r} is an unknown format; known: {', '.join(_formats())}")
