"""Bytes of a file as tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from shard_plans.checkpoints.regular import open_regular
from shard_plans.errors import ReshardError, RuntimeFault

TORCH_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64", "F16": "float16",
    "BF16": "bfloat16", "F32": "float32", "F64": "float64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
"""safetensors' word -> torch's name; older versions of torch lack the last ones."""


def torch_dtype(word: str) -> torch.dtype:
    """The type for safetensors' word; RuntimeFault where this torch has none."""
    found = getattr(torch, TORCH_DTYPES.get(word, ""), None)
    if not isinstance(found, torch.dtype):
        raise RuntimeFault(f"torch {torch.__version__} has no type for {word} tensors")
    return found


def as_stored(flat: Tensor, dtype: str, shape: Sequence[int]) -> Tensor:
    """The bytes `flat` as a tensor of safetensors' type `dtype`; same memory."""
    kind = torch_dtype(dtype)
    size = torch.empty(0, dtype=kind).element_size()
    if flat.numel() != math.prod(shape) * size:
        raise RuntimeFault(f"{flat.numel()} bytes can't be {dtype} {list(shape)}")
    return flat.view(kind).view(tuple(shape))


def open_file(path: Path, error: type[ReshardError]) -> int:
    """A file descriptor to read `path` by; `error` where that can't be done."""
    try:
        return open_regular(path)
    except OSError as fault:
        raise error(f"{path} can't be opened: {fault.strerror}") from fault
