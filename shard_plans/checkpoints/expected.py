"""What a checkpoint should hold by its config.json alone: the columns of a checkpoint, made when asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from shard_plans.checkpoints.dtypes import DTYPE_BITS
from shard_plans.checkpoints.headers import Int64


@dataclass(frozen=True, slots=True)
class Alike:
    """Tensors that differ in the number of their expert alone, or one tensor."""

    pattern: str
    """Name; `{expert}` is kept where there are several."""
    count: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one of them."""
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8

    @property
    def names(self) -> Iterator[str]:
        """All their names, in expert order."""
        return (self.pattern.replace("{expert}", str(expert)) for expert in range(self.count))


@dataclass(frozen=True, eq=False)
class Expected:
    """The tensors that a config.json announces. Half a million names cost memory and time: they are made when asked."""

    folder: Path
    """The config.json itself; called so because a checkpoint has its folder there."""
    config: Mapping[str, Any] = field(repr=False)
    config_digest: str
    """xxh3-128 of config.json as it lies there, in hex."""
    runs: tuple[Alike, ...] = field(repr=False)
    """In execution order."""

    fingerprint = None
    """Only a checkpoint has one: it is taken of headers."""

    @cached_property
    def count(self) -> int:
        """Tensors."""
        return sum(run.count for run in self.runs)

    def __len__(self) -> int:
        """Tensors."""
        return self.count

    @cached_property
    def total_bytes(self) -> int:
        """Payload bytes of all tensors."""
        return sum(run.count * run.nbytes for run in self.runs)

    @cached_property
    def names(self) -> list[str]:
        """The name of each tensor."""
        return [name for run in self.runs for name in run.names]

    @cached_property
    def dtypes(self) -> list[str]:
        """The type of each tensor, by safetensors' word."""
        return [run.dtype for run in self.runs for _ in range(run.count)]

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of each tensor."""
        return [run.shape for run in self.runs for _ in range(run.count)]

    @cached_property
    def sizes(self) -> Int64:
        """The bytes of each tensor."""
        return np.repeat(
            np.array([run.nbytes for run in self.runs], np.int64), np.array([run.count for run in self.runs], np.int64)
        )
