"""INT4 groups (compressed-tensors' pack-quantized): eight numbers a word, a scale for each group of columns."""

from __future__ import annotations

import torch
from torch import Tensor

from shard_plans.errors import RuntimeFault

PACKED = 8
"""Numbers in a word of 32 bits, the first in its lowest four."""
ZERO = 8
"""What is added to a number, -8 to 7, before it is packed."""


def decode(values: Tensor, scale: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """Packed `values` int32 [.., rows, columns / 8] and `scale` [.., rows, ceil(columns / group)]: dense in `dtype`.

    Number times scale, in float32 or `dtype` if it is wider, exact but for the last rounding.
    """
    columns = PACKED * values.shape[-1]
    expected = (*values.shape[:-1], -(-columns // group))
    if values.dtype != torch.int32 or not scale.is_floating_point() or tuple(scale.shape) != expected:
        raise RuntimeFault(
            f"int4_group: values {values.dtype} {list(values.shape)} in groups of {group} need scales "
            f"{list(expected)}, found {scale.dtype} {list(scale.shape)}"
        )
    wide = torch.promote_types(dtype, torch.float32)
    shifts = torch.arange(0, 4 * PACKED, 4, dtype=torch.int32, device=values.device)
    numbers = ((values[..., None] >> shifts) & 15).sub_(ZERO).view(*values.shape[:-1], columns).to(wide)
    factors = scale.to(wide)
    if columns % group:
        return numbers.mul_(factors.repeat_interleave(group, -1)[..., :columns]).to(dtype)
    return numbers.view(*factors.shape, group).mul_(factors[..., None]).view(numbers.shape).to(dtype)
