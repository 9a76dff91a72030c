"""Normalisation."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, accumulated in float32 or higher; `weight` is applied last.

    x [.., width], weight [width] in x's dtype. As Llama: w * (x / sqrt(mean(x^2) + eps)) rounded before the product.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)
