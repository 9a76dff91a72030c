"""MXFP4: two E2M1 numbers a byte, a power of two for each group of them along the columns."""

from __future__ import annotations

import torch
from torch import Tensor

from shard_plans.errors import RuntimeFault

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the codes 0 to 7; bit 3 is the sign (OCP Microscaling Formats 1.0)."""
BIAS, NOT_A_NUMBER = 127, 255
"""Of the scales (E8M0): a code c is 2^(c - BIAS), one code is none."""


def decode(values: Tensor, scale: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """Packed `values` [.., rows, columns / 2] and `scale` [.., rows, ceil(columns / group)], both uint8: dense.

    The low nibble is the even column. Exact in float32 and float64 but for scales at the ends of float32's range, where
    float32 rounds as it must.
    """
    columns = 2 * values.shape[-1]
    expected = (*values.shape[:-1], -(-columns // group))
    if values.dtype != torch.uint8 or scale.dtype != torch.uint8 or tuple(scale.shape) != expected:
        raise RuntimeFault(
            f"mxfp4_group: values {values.dtype} {list(values.shape)} in groups of {group} need uint8 scales "
            f"{list(expected)}, found {scale.dtype} {list(scale.shape)}"
        )
    wide = torch.promote_types(dtype, torch.float32)
    pairs, powers = _pairs(wide, values.device), _powers(wide, values.device)
    numbers = pairs.index_select(0, values.reshape(-1).int()).view(*values.shape[:-1], columns)
    factors = powers.index_select(0, scale.reshape(-1).int()).view(scale.shape)
    if columns % group:
        return numbers.mul_(factors.repeat_interleave(group, -1)[..., :columns]).to(dtype)
    return numbers.view(*factors.shape, group).mul_(factors[..., None]).view(numbers.shape).to(dtype)


def _pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Both numbers of each byte [256, 2]."""
    codes = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=dtype, device=device)
    byte = torch.arange(256, device=device)
    return torch.stack([codes[byte & 15], codes[byte >> 4]], dim=-1)


def _powers(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The factor of each scale code [256]; made in float64 on the CPU, where 2^-127 is no special case."""
    powers = torch.exp2(torch.arange(256, dtype=torch.float64) - BIAS)
    powers[NOT_A_NUMBER] = float("nan")
    return powers.to(dtype).to(device)
