"""Hyper-connections: a token carries several streams; each block sees a blend of them, and adds to all.

How they blend is computed from the streams themselves (manifold-constrained hyper-connections, arXiv 2512.24880).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from runtime.blocks.context import RankContext
from runtime.blocks.linear import expect_shape
from runtime.blocks.norms import unit_rms
from runtime.blocks.weights import LayerWeights, dense, take


def enter(ctx: RankContext, weights: LayerWeights, block: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For streams x [T, n, hidden]: what the block sees [T, hidden], shares of its output [T, n], the streams mixed.

    Reads BLOCK.hc_fn [(2 + n) n, n hidden], hc_base and hc_scale: a sigmoid gives the blend, twice a sigmoid the
    shares, and the streams are mixed by a matrix brought near a doubly stochastic one: `sinkhorn` times its columns,
    and between these its rows, are divided by their sums. It is applied transposed.
    """
    count, eps, rounds = x.shape[1], ctx.model.words["hyper_eps"], int(ctx.model.words["sinkhorn"])
    raw, base, scale = _raw(ctx, weights, block, x, (2 + count) * count, 3)
    parts = [count, count, count * count]
    pre, post, mix = (
        part * factor + offset
        for part, factor, offset in zip(torch.split(raw, parts, dim=-1), scale, torch.split(base, parts), strict=True)
    )
    mix = mix.view(-1, count, count).softmax(-1) + eps
    mix = mix / (mix.sum(-2, keepdim=True) + eps)
    for _ in range(rounds - 1):
        mix = mix / (mix.sum(-1, keepdim=True) + eps)
        mix = mix / (mix.sum(-2, keepdim=True) + eps)
    seen = _blend(pre.sigmoid() + eps, x)
    return seen, (2 * post.sigmoid()).to(x.dtype), torch.matmul(mix.to(x.dtype).transpose(-1, -2), x)


def leave(ctx: RankContext, weights: LayerWeights, x: Tensor) -> Tensor:
    """The streams as the head sees them [T, hidden]; reads out.hc_fn [n, n hidden], hc_base and hc_scale."""
    raw, base, scale = _raw(ctx, weights, "out", x, x.shape[1], 1)
    return _blend((raw * scale + base).sigmoid() + ctx.model.words["hyper_eps"], x)


def _blend(shares: Tensor, x: Tensor) -> Tensor:
    return (shares[..., None] * x).sum(1).to(x.dtype)


def _raw(
    ctx: RankContext, weights: LayerWeights, block: str, x: Tensor, rows: int, scales: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The product of all streams, brought to a mean square of 1, with BLOCK.hc_fn; the base and the scales."""
    wide = ctx.accumulate()
    fn, base, scale = (dense(take(weights, f"{block}.{role}"), wide) for role in ("hc_fn", "hc_base", "hc_scale"))
    flat = unit_rms(x.flatten(1).to(wide), ctx.model.words["eps"])
    for role, tensor, shape in (
        ("hc_fn", fn, (rows, flat.shape[1])), ("hc_base", base, (rows,)), ("hc_scale", scale, (scales,)),
    ):  # fmt: skip
        expect_shape(f"{block}.{role}", tensor, shape)
    return ctx.pulse.saw(f"{block}.hc_fn", functional.linear(flat, fn)), base, scale
