"""Weights of a layer rounded to another storage format, as convert --weights would store them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from converter.precision.codec import Coding
from runtime.blocks.weights import Stored, dense_expert, expert_count
from runtime.loading.reading import torch_dtype
from shard_plans.families.weights import WeightFormat

POWERS = ("float8_e8m0fnu", "uint8")
"""Types of scales that are powers of two; so are then those of the new format."""


def rounded(stored: Stored | tuple[Stored, ...], target: WeightFormat, turned: bool) -> Stored | tuple[Stored, ...]:
    """The parameter in the format `target`, which has scales; experts one by one.

    `turned`: plain experts are stored [in, out], quantised ones [out, in]. What isn't a matrix stays as it is.
    """
    if not isinstance(stored, Stored):
        return tuple(_matrix(one, 0, target, turned and one.format is None) for one in stored)
    dimensions = stored.values.dim() if stored.format != "mxfp4_blocks" else stored.values.dim() - 1
    if dimensions == 2:
        return _matrix(stored, None, target, False)
    if dimensions != 3:
        return stored
    return tuple(
        _matrix(stored, expert, target, turned and stored.format is None) for expert in range(expert_count(stored))
    )


def _matrix(stored: Stored, expert: int | None, target: WeightFormat, turned: bool) -> Stored:
    """One matrix."""
    one = stored if expert is None or stored.values.dim() == 2 else _only(stored, expert)
    x = dense_expert((one,), 0, torch.float32).cpu()
    if x.dim() != 2:
        return one
    matrix = (x.T if turned else x).contiguous().numpy()
    block = target.block or (1, matrix.shape[1])
    if (one.format, one.block) == (target.format, block):
        return one  # stored so already
    coding = Coding(target.values, target.scale, block)
    powers = one.scale is not None and str(one.scale.dtype).removeprefix("torch.") in POWERS
    made = coding.encode(matrix, powers=powers)
    device = stored.values.device
    values, scale = (_tensor(made[kind], word) for kind, word in (("values", target.values), ("scale", target.scale)))
    return Stored(values.to(device), scale.to(device), target.format, block)


def _only(stored: Stored, expert: int) -> Stored:
    """One expert of a stack."""
    scale, whole = (None if part is None else part[expert] for part in (stored.scale, stored.whole))
    return Stored(stored.values[expert], scale, stored.format, stored.block, whole)


def _tensor(array: np.ndarray[Any, np.dtype[Any]], word: str | None) -> Tensor:
    """Elements as stored, under their type."""
    flat = torch.from_numpy(np.ascontiguousarray(array).view(np.uint8).reshape(-1))
    return flat.view(torch_dtype(word or "F32")).reshape(array.shape)
