"""Kimi Delta Attention: short convolutions, a forget gate for each head and channel, and the gated delta rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from runtime.blocks.beside import Beside
from runtime.blocks.cache import LayerCache
from runtime.blocks.context import RankContext
from runtime.blocks.convolution import convolve
from runtime.blocks.delta_rule import chunked, recurrent, unit_length
from runtime.blocks.linear import column_linear, expect_shape, output_gate, row_linear
from runtime.blocks.norms import weighted_norm
from runtime.blocks.weights import LayerWeights, dense, take
from shard_plans.families.model import Layer


def kda(
    ctx: RankContext, layer: Layer, weights: LayerWeights, x: Tensor, cache: LayerCache | None, positions: Tensor,
    beside: Beside,
) -> Tensor:  # fmt: skip
    """Linear attention over x [T, hidden], the next tokens of a sequence: [T, hidden], summed over tp.

    Reads kda.q, k, v and their q_conv, k_conv, v_conv; kda.f_a, f_b, A_log, dt_bias (forget gate), kda.b (how much of
    the value is written), kda.o_norm, attn.o; for the output's gate attn.gate, or kda.g_a and g_b where `gate:
    low_rank`. Heads are dealt to tp; f_a, g_a and o_norm are whole everywhere.
    The cache keeps the last inputs of the convolutions [taps - 1, 3 * heads * width] and the state [heads, width,
    width] in float32 or the compute dtype if it is wider; their size doesn't grow with the tokens.
    """
    heads, width, wide = ctx.share("kda_heads"), ctx.size("kda_dim"), ctx.accumulate()
    kept = cache.recall() if cache is not None else []
    inputs = torch.cat([_input(ctx, weights, name, x, heads * width) for name in "qkv"], dim=-1)
    tail, state = kept or (
        inputs.new_zeros((ctx.size("taps") - 1, inputs.shape[1])),
        inputs.new_zeros((heads, width, width), dtype=wide),
    )
    inputs = torch.cat([tail, inputs])
    q, k, v = (
        convolve(inputs[:, start : start + heads * width].to(wide), _taps(ctx, weights, name, heads * width))
        .view(-1, heads, width)
        .transpose(0, 1)
        for name, start in (("q_conv", 0), ("k_conv", heads * width), ("v_conv", 2 * heads * width))
    )
    q, k = unit_length(q) * width**-0.5, unit_length(k)
    g = forget(ctx, layer.words, weights, x).transpose(0, 1)
    beta = column_linear(ctx, weights, "kda.b", x).to(wide).sigmoid().transpose(0, 1)
    rule = recurrent if x.shape[0] == 1 else chunked
    o, state = rule(q, k, v, g, beta, state)
    if cache is not None:
        cache.replace(positions, [inputs[inputs.shape[0] - tail.shape[0] :].clone(), state])
    o = weighted_norm(ctx, weights, "kda.o_norm", o.transpose(0, 1), ctx.model.words["eps"])
    full = layer.words["gate"] == "full_rank"
    inner, role = (x, "attn.gate") if full else (column_linear(ctx, weights, "kda.g_a", x), "kda.g_b")
    return row_linear(ctx, weights, "attn.o", output_gate(ctx, weights, role, inner, o.reshape(-1, heads * width)))


def forget(ctx: RankContext, words: Mapping[str, Any], weights: LayerWeights, x: Tensor) -> Tensor:
    """Log of the decay of every head and channel [T, heads, width], at most 0; A_log is one number a head.

    `softplus`: -exp(A_log) softplus(raw + dt_bias) (Kimi Linear). `sigmoid`: decay_bound sigmoid(exp(A_log) (raw +
    dt_bias)), which the bound scales and doesn't cut off (Kimi K3).
    """
    heads, width, wide = ctx.share("kda_heads"), ctx.size("kda_dim"), ctx.accumulate()
    low = column_linear(ctx, weights, "kda.f_a", x)
    raw = column_linear(ctx, weights, "kda.f_b", low).to(wide)
    rate, bias = dense(take(weights, "kda.A_log"), wide).exp().flatten(), dense(take(weights, "kda.dt_bias"), wide)
    expect_shape("kda.A_log", rate, (heads,))
    expect_shape("kda.dt_bias", bias, (heads * width,))
    raw = (raw + bias).view(-1, heads, width)
    if words["decay"] == "softplus":
        return -rate[:, None] * functional.softplus(raw)
    bound: float = words["decay_bound"]
    return bound * (rate[:, None] * raw).sigmoid()


def _input(ctx: RankContext, weights: LayerWeights, name: str, x: Tensor, rows: int) -> Tensor:
    y = column_linear(ctx, weights, f"kda.{name}", x)
    expect_shape(f"kda.{name} times x", y, (x.shape[0], rows))
    return y


def _taps(ctx: RankContext, weights: LayerWeights, name: str, channels: int) -> Tensor:
    taps = dense(take(weights, f"kda.{name}"), ctx.accumulate())
    expect_shape(f"kda.{name}", taps, (channels, 1, ctx.size("taps")))
    return taps[:, 0]
