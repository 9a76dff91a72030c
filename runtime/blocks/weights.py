"""Weights as a shard or the checkpoint holds them, and as the layer's arithmetic needs them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.alive.pulse import Pulse
from runtime.blocks.quantised import FORMATS, dequantise
from shard_plans.errors import RuntimeFault
from shard_plans.families.vocabulary import COMPUTED


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """One parameter as stored: values and, where it is quantised, their scales. A stack of experts is one parameter."""

    values: Tensor
    """[rows, columns], [experts, rows, columns] or [length]."""
    scale: Tensor | None = None
    """[.., ceil(rows / block rows), ceil(columns / block columns)]; MXFP4's are uint8 exponents."""
    format: str | None = None
    """A storage format (docs/precision.md), or None where the values are plain."""
    block: tuple[int, int] | None = None
    """Rows and columns that share one scale; the last block of a side may be partial."""
    whole: Tensor | None = None
    """NVFP4: [.., 1] float32, by which the scales of the matrix are divided."""


LayerWeights = Mapping[str, "Stored | tuple[Stored, ...]"]
"""Native name without its `layers.N.` prefix -> what is stored; unstacked experts are a tuple, one Stored an expert."""


def dense(stored: Stored, dtype: torch.dtype) -> Tensor:
    """The values in `dtype`, dequantised; value times scale is rounded to float32, whatever `dtype` is."""
    return _dense(stored.values, stored.scale, stored.whole, stored, dtype)


def dense_expert(stored: Stored | Sequence[Stored], index: int, dtype: torch.dtype) -> Tensor:
    """The matrix [rows, columns] of local expert `index`, dequantised alone."""
    if not isinstance(stored, Stored):
        return dense(stored[index], dtype)
    scale, whole = (None if part is None else part[index] for part in (stored.scale, stored.whole))
    return _dense(stored.values[index], scale, whole, stored, dtype)


def expert_count(stored: Stored | Sequence[Stored]) -> int:
    """How many experts are stacked or listed."""
    return stored.values.shape[0] if isinstance(stored, Stored) else len(stored)


def take(weights: LayerWeights, name: str) -> Stored:
    """The parameter `name`; RuntimeFault if it isn't there, or is a list of experts."""
    stored = optional(weights, name)
    if stored is None:
        raise RuntimeFault(f"the weight {name} is missing; the layer holds {', '.join(sorted(weights)) or 'nothing'}")
    return stored


def optional(weights: LayerWeights, name: str) -> Stored | None:
    """The parameter `name`, or None where the layer has none."""
    stored = weights.get(name)
    if isinstance(stored, tuple):
        raise RuntimeFault(f"the weight {name} is a list of {len(stored)} experts, one matrix is needed")
    return stored


class Readings(Mapping[str, "Stored | tuple[Stored, ...]"]):
    """A layer's weights that remembers which were read, so that one that no block reads is noticed.

    Tells `pulse` of each: reading its weight is how an operator begins.
    """

    def __init__(self, weights: LayerWeights, pulse: Pulse) -> None:
        self._weights, self._pulse = weights, pulse
        self._read: set[str] = set()

    def __getitem__(self, name: str) -> Stored | tuple[Stored, ...]:
        stored = self._weights[name]
        self._read.add(name)
        self._pulse.begin(name)
        return stored

    def __contains__(self, name: object) -> bool:
        return name in self._weights

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def refuse_unread(self) -> None:
        """Raise RuntimeFault if some weight was never read."""
        unread = sorted(set(self._weights) - self._read - COMPUTED)
        if unread:
            raise RuntimeFault(f"no block reads {', '.join(unread)}; the family table's words need another block")


def _dense(values: Tensor, scale: Tensor | None, whole: Tensor | None, stored: Stored, dtype: torch.dtype) -> Tensor:
    if stored.format is None:
        if scale is not None or (values.is_floating_point() and values.element_size() == 1):
            raise RuntimeFault(f"{values.dtype} values {_shape(values)} came without a format; say how to read them")
        return values.to(dtype)
    if stored.format not in FORMATS:
        raise RuntimeFault(f"no block dequantises the format {stored.format}; the runtime has {', '.join(FORMATS)}")
    if scale is None or stored.block is None:
        raise RuntimeFault(
            f"{stored.format} values {_shape(values)} came without {'scale' if scale is None else 'block size'}"
        )
    return dequantise(values, scale, whole, stored.format, stored.block, dtype)


def _shape(x: Tensor) -> str:
    return "x".join(str(size) for size in x.shape)
