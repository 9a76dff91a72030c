"""Norms of queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.blocks.context import RankContext
from runtime.blocks.linear import expect_shape
from runtime.blocks.norms import model_norm, unit_rms
from runtime.blocks.weights import LayerWeights, dense, take


def norm_heads(
    ctx: RankContext, kind: str | None, weights: LayerWeights, q: Tensor, k: Tensor
) -> tuple[Tensor, Tensor]:
    """Q [T, heads, width] and k [T, KV heads, width] of this rank, normed before RoPE by the word `qk_norm`.

    `per_head`: over each head, weights attn.q_norm and attn.k_norm [width]. `all_heads`: one norm over all heads of all
    ranks, its weights cut like the heads (MiniMax-M2).
    """
    if kind == "per_head":
        return model_norm(ctx, weights, "attn.q_norm", q), model_norm(ctx, weights, "attn.k_norm", k)
    return _all_heads(ctx, weights, q, k) if kind == "all_heads" else (q, k)


def unit_heads(ctx: RankContext, kind: str | None, x: Tensor) -> Tensor:
    """`l2`: each head of x [T, heads, width] at a root mean square of 1, without weights, after RoPE (Llama 4)."""
    return unit_rms(x, ctx.model.words["eps"]).to(x.dtype) if kind == "l2" else x


def _all_heads(ctx: RankContext, weights: LayerWeights, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of squares are added up over tp; a KV head that lies on several ranks counts once."""
    wide, width, tp = ctx.accumulate(), ctx.size("head_dim"), ctx.grid.tp
    copies = k.shape[1] * tp / ctx.size("kv_heads")
    flat = [x.flatten(1).to(wide) for x in (q, k)]
    sums = ctx.reduce_tp(torch.stack([x.pow(2).sum(-1) for x in flat], dim=-1))
    totals = (ctx.size("heads") * width, ctx.size("kv_heads") * width * copies)
    normed = []
    for x, part, role, total, number in zip((q, k), flat, ("attn.q_norm", "attn.k_norm"), totals, (0, 1), strict=True):
        weight = dense(take(weights, role), ctx.compute)
        expect_shape(role, weight, (part.shape[1],))
        scale = torch.rsqrt(sums[:, number, None] / total + ctx.model.words["eps"])
        normed.append((weight * (part * scale).to(ctx.compute)).view(x.shape))
    return normed[0], normed[1]
