"""Gated DeltaNet: a short convolution, a forget gate for each value head, and the gated delta rule."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from runtime.blocks.beside import Beside
from runtime.blocks.cache import LayerCache
from runtime.blocks.context import RankContext
from runtime.blocks.convolution import convolve
from runtime.blocks.delta_rule import chunked, recurrent, unit_length
from runtime.blocks.linear import check_inner, column_linear, expect_shape, row_linear
from runtime.blocks.norms import weighted_norm
from runtime.blocks.weights import LayerWeights, dense, take
from shard_plans.families.model import Layer


def gdn(
    ctx: RankContext, layer: Layer, weights: LayerWeights, x: Tensor, cache: LayerCache | None, positions: Tensor,
    beside: Beside,
) -> Tensor:  # fmt: skip
    """Linear attention over x [T, hidden], the next tokens of a sequence: [T, hidden], summed over tp.

    Each key head has `per_key` value heads behind it. Reads what `project` does; gdn.conv, rows of all queries, then
    all keys, then all values; gdn.A_log and dt_bias, one number a value head; gdn.norm, attn.o. Key heads are dealt to
    tp where they divide, else all ranks hold all. The cache keeps the last inputs of the convolution [taps - 1, rows]
    and the state [value heads, dk, dv], as kda does.
    """
    wide, tp = ctx.accumulate(), ctx.grid.tp
    keys, per_key, dk, dv = (ctx.size(name) for name in ("key_heads", "per_key", "dk", "dv"))
    dealt = keys % tp == 0
    keys = keys // tp if dealt else keys
    heads, tokens = keys * per_key, x.shape[0]
    inputs, gate, beta, alpha = project(ctx, weights, x, keys)
    tail, state = (cache.recall() if cache is not None else []) or (
        inputs.new_zeros((ctx.size("taps") - 1, inputs.shape[1])),
        inputs.new_zeros((heads, dk, dv), dtype=wide),
    )
    inputs = torch.cat([tail, inputs])
    taps = dense(take(weights, "gdn.conv"), wide)
    expect_shape("gdn.conv", taps, (inputs.shape[1], 1, ctx.size("taps")))
    q, k, v = torch.split(convolve(inputs.to(wide), taps[:, 0]), [keys * dk, keys * dk, heads * dv], dim=-1)
    q, k = (unit_length(part.view(tokens, keys, dk)).repeat_interleave(per_key, dim=1) for part in (q, k))
    decay = forget(weights, alpha.to(wide))[..., None].expand(-1, -1, dk)
    rule = recurrent if tokens == 1 else chunked
    heads_first = (part.transpose(0, 1) for part in (q * dk**-0.5, k, v.view(tokens, heads, dv), decay, beta.to(wide)))
    q, k, v, decay, beta = heads_first
    o, state = rule(q, k, v, decay, beta.sigmoid(), state)
    if cache is not None:
        cache.replace(positions, [inputs[inputs.shape[0] - tail.shape[0] :].clone(), state])
    o = weighted_norm(ctx, weights, "gdn.norm", o.transpose(0, 1), ctx.model.words["eps"])
    y = (o * functional.silu(gate.view(tokens, heads, dv).to(wide))).to(ctx.compute).reshape(tokens, -1)
    return row_linear(ctx, weights, "attn.o", y) if dealt else _whole(ctx, weights, y)


def project(ctx: RankContext, weights: LayerWeights, x: Tensor, keys: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of tokens x [T, hidden]: all queries, all keys, all values [T, rows]; the values' output gates [T, heads * dv];
    how much of each value head is written, and its raw forget gate, both [T, heads].

    Reads gdn.qkvz, rows by key head: query, key, its values, their gates; and gdn.ba, likewise (Qwen3-Next). Or each in
    one piece: gdn.qkv, gdn.z, gdn.b, gdn.a (Qwen3.5).
    """
    per_key, dk, dv = (ctx.size(name) for name in ("per_key", "dk", "dv"))
    if "gdn.qkvz" in weights:
        parts = _by_key_head(ctx, weights, "gdn.qkvz", x, keys, [dk, dk, per_key * dv, per_key * dv])
        beta, alpha = _by_key_head(ctx, weights, "gdn.ba", x, keys, [per_key, per_key])
        return torch.cat(parts[:3], dim=-1), parts[3], beta, alpha
    heads = keys * per_key
    found = []
    for role, rows in (("qkv", 2 * keys * dk + heads * dv), ("z", heads * dv), ("b", heads), ("a", heads)):
        y = column_linear(ctx, weights, f"gdn.{role}", x)
        expect_shape(f"gdn.{role} times x", y, (x.shape[0], rows))
        found.append(y)
    return found[0], found[1], found[2], found[3]


def forget(weights: LayerWeights, raw: Tensor) -> Tensor:
    """Log of the decay of every value head, from its raw gate [T, heads]: -exp(A_log) softplus(raw + dt_bias)."""
    rate, bias = (dense(take(weights, f"gdn.{name}"), raw.dtype) for name in ("A_log", "dt_bias"))
    for name, number in (("A_log", rate), ("dt_bias", bias)):
        expect_shape(f"gdn.{name}", number, (raw.shape[1],))
    return -rate.exp() * functional.softplus(raw + bias)


def _by_key_head(
    ctx: RankContext, weights: LayerWeights, role: str, x: Tensor, keys: int, parts: list[int]
) -> list[Tensor]:
    """The product of x with `role`, whose rows are these parts for each key head: each part of all heads [T, ...]."""
    y = column_linear(ctx, weights, role, x)
    expect_shape(f"{role} times x", y, (x.shape[0], keys * sum(parts)))
    return [part.flatten(1) for part in torch.split(y.view(x.shape[0], keys, -1), parts, dim=-1)]


def _whole(ctx: RankContext, weights: LayerWeights, y: Tensor) -> Tensor:
    """The product with attn.o where every rank holds all of it: nothing is to be summed."""
    matrix = dense(take(weights, "attn.o"), ctx.compute)
    check_inner("attn.o", matrix, y)
    return ctx.pulse.saw("attn.o", functional.linear(y, matrix))
