"""Numbers with scales: FP8 and INT8 by blocks or rows, INT4 and FP4 by groups -> dense values.

Each number is multiplied by its block's scale in float32 and rounded to it once, whatever type is asked for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.blocks import int4, mxfp4
from shard_plans.errors import RuntimeFault

FORMATS = (
    "fp8_block", "fp8_channel", "fp8_scale", "int8_channel", "int4_group", "mxfp4_group", "mxfp4_blocks", "fp4_scale",
    "nvfp4",
)  # fmt: skip
"""Storage formats (shard_plans/families/tables/_formats.yaml) that can be read."""


def dequantise(
    values: Tensor, scale: Tensor, whole: Tensor | None, format: str, block: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """Dense [.., rows, columns] in `dtype`.

    `values` as stored; `scale` [.., ceil(rows / block rows), ceil(columns / block columns)]; `whole` [.., 1] divides
    the scales, where the format has it. RuntimeFault where they don't fit together.
    """
    if format == "mxfp4_blocks":
        values = values.flatten(-2)
    if format == "fp4_scale":  # the same bytes under types of their own
        values, scale = values.view(torch.uint8), scale.view(torch.uint8)
    if format in ("mxfp4_group", "mxfp4_blocks", "fp4_scale"):
        return mxfp4.decode(values, scale, block[1], dtype)
    if format == "int4_group":
        return int4.decode(values, scale, block[1], dtype)
    numbers = _numbers(values, format)
    rows, columns = numbers.shape[-2:]
    grid = (*numbers.shape[:-2], -(-rows // block[0]), -(-columns // block[1]))
    if tuple(scale.shape) != grid:
        raise RuntimeFault(
            f"{format}: values {_shape(numbers)} in blocks of {block[0]}x{block[1]} need scales {grid}, "
            f"found {_shape(scale)}"
        )
    factors = scale.to(torch.float32)
    if format == "nvfp4":
        if whole is None:
            raise RuntimeFault(f"nvfp4 values {_shape(values)} came without the scale of their matrix")
        factors = factors / whole.to(torch.float32)[..., None]
    wide = factors.repeat_interleave(block[1], -1)[..., :columns]
    wide = wide.repeat_interleave(block[0], -2)[..., :rows, :]
    return numbers.mul_(wide).to(dtype)


def _numbers(values: Tensor, format: str) -> Tensor:
    """The numbers as float32, unpacked."""
    if format == "nvfp4":
        codes = torch.tensor([*mxfp4.E2M1, *(-value for value in mxfp4.E2M1)], device=values.device)
        nibbles = torch.stack([values & 15, values >> 4], -1).flatten(-2)
        return codes[nibbles.int()]
    return values.to(torch.float32)


def _shape(x: Tensor) -> str:
    return "x".join(str(size) for size in x.shape)
