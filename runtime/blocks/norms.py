"""Normalisation."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.blocks.context import RankContext
from runtime.blocks.weights import LayerWeights, dense, take


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, accumulated in float32 or higher; `weight` is applied last.

    x [.., width], weight [width] in x's dtype. As Llama: w * (x / sqrt(mean(x^2) + eps)) rounded before the product.
    """
    return weight * unit_rms(x, eps).to(x.dtype)


def unit_rms(x: Tensor, eps: float) -> Tensor:
    """The last dimension brought to a mean square of 1: x / sqrt(mean(x^2) + eps), in float32 or higher."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


def model_norm(ctx: RankContext, weights: LayerWeights, role: str, x: Tensor) -> Tensor:
    """The norm that the model's word `norm` says, with the model's eps, over the last dimension; reads `role` [width].

    `rms`: as `rms_norm`. `rms_cast_last`: rounded after the product with the weight, not before (DeepSeek-V4).
    `rms_zero_centred`: the same with 1 + weight (Gemma, Qwen3-Next).
    """
    kind, eps, stored = ctx.model.words["norm"], ctx.model.words["eps"], take(weights, role)
    if kind == "rms":
        return ctx.pulse.saw(role, rms_norm(x, dense(stored, x.dtype), eps))
    wide = unit_rms(x, eps)
    weight = dense(stored, wide.dtype)
    return ctx.pulse.saw(role, (wide * (1 + weight if kind == "rms_zero_centred" else weight)).to(x.dtype))


def weighted_norm(ctx: RankContext, weights: LayerWeights, role: str, x: Tensor, eps: float) -> Tensor:
    """`rms_norm` by the weight `role` [width], taken in x's dtype, with an eps of its own."""
    return ctx.pulse.saw(role, rms_norm(x, dense(take(weights, role), x.dtype), eps))


def biased_norm(ctx: RankContext, weights: LayerWeights, role: str, x: Tensor, eps: float) -> Tensor:
    """`layer_norm` over the last dimension in the compute dtype; reads `role` and its bias."""
    weight, bias = (dense(take(weights, name), ctx.compute) for name in (role, f"{role}.bias"))
    return ctx.pulse.saw(role, layer_norm(x, weight, bias, eps))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Mean and variance taken out, then weight and bias; accumulated in float32 or higher; all in x's dtype."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide - wide.mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * weight.to(wide.dtype) + bias.to(wide.dtype)).to(x.dtype)
