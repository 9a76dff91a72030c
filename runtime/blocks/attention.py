"""Grouped-query attention, and the causal softmax that latent attention shares."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.blocks.cache import LayerCache
from runtime.blocks.context import RankContext
from runtime.blocks.linear import fused_linear, row_linear
from runtime.blocks.norms import rms_norm
from runtime.blocks.rope import softmax_scale, turner
from runtime.blocks.weights import LayerWeights, dense, take
from shard_plans.errors import RuntimeFault
from shard_plans.families.model import Layer

SCORES_AT_ONCE = 1 << 26
"""Attention scores (heads x queries x keys) held in memory at a time."""


def gqa(
    ctx: RankContext, layer: Layer, weights: LayerWeights, x: Tensor, cache: LayerCache | None, positions: Tensor
) -> Tensor:
    """Attention over x [T, hidden] at `positions` [T]: [T, hidden], summed over tp.

    Reads attn.qkv or attn.q, attn.k, attn.v; attn.q_norm and attn.k_norm where `qk_norm` is per_head; attn.o. Any may
    have a bias. Where KV heads are fewer than tp ranks, each rank holds the one head that its queries need.
    """
    words, width = layer.words, ctx.size("head_dim")
    heads, kv_heads = ctx.share("heads"), local_kv_heads(ctx)
    rows = (heads * width, kv_heads * width, kv_heads * width)
    q, k, v = fused_linear(ctx, weights, "attn.qkv", ("attn.q", "attn.k", "attn.v"), rows, x)
    q, k, v = (part.view(x.shape[0], part.shape[1] // width, width) for part in (q, k, v))
    if words.get("qk_norm") == "per_head":
        q = rms_norm(q, dense(take(weights, "attn.q_norm"), ctx.compute), ctx.model.words["eps"])
        k = rms_norm(k, dense(take(weights, "attn.k_norm"), ctx.compute), ctx.model.words["eps"])
    turn = turner(words, ctx.model.text, rotary_width(ctx, layer, width), positions, ctx.compute)
    q, k = turn(q), turn(k)
    seen = positions
    if cache is not None:
        seen, (k, v) = cache.append(positions, [k, v])
    scale = softmax_scale(words, ctx.model.text, width)
    y = attend(q, k, v, scale, positions, seen, words.get("window"))
    return row_linear(ctx, weights, "attn.o", y)


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, positions: Tensor, seen: Tensor, window: int | None
) -> Tensor:
    """Causal softmax attention: q [T, heads, d] at `positions`, k [S, kv, d] and v [S, kv, dv] at `seen`.

    Query head h reads KV head h // (heads / kv). A key is visible from its own position on, and with a `window` for
    `window` positions. Softmax in float32 or higher. Returns [T, heads * dv].
    """
    tokens, heads, width = q.shape
    keys, kv_heads, value_width = v.shape
    grouped = q.transpose(0, 1).reshape(kv_heads, heads // kv_heads, tokens, width)
    k, v = k.permute(1, 2, 0)[:, None], v.transpose(0, 1)[:, None]
    outputs = []
    step = max(1, SCORES_AT_ONCE // max(1, heads * keys))
    for start in range(0, tokens, step):
        scores = torch.matmul(grouped[:, :, start : start + step], k) * scale
        ago = positions[start : start + step, None] - seen
        hidden = ago < 0 if window is None else (ago < 0) | (ago >= window)
        scores = scores.to(torch.promote_types(q.dtype, torch.float32)).masked_fill(hidden, float("-inf"))
        outputs.append(torch.matmul(scores.softmax(-1).to(q.dtype), v))
    if not outputs:
        return q.new_zeros((0, heads * value_width))
    return torch.cat(outputs, dim=2).reshape(heads, tokens, value_width).transpose(0, 1).reshape(tokens, -1)


def local_kv_heads(ctx: RankContext) -> int:
    """KV heads that this rank holds: its share, or 1 where they are repeated."""
    kv_heads, tp = ctx.size("kv_heads"), ctx.grid.tp
    if kv_heads % tp and tp % kv_heads:
        raise RuntimeFault(f"{kv_heads} KV heads can neither be dealt to tp {tp} ranks nor repeated on them")
    return max(1, kv_heads // tp)


def rotary_width(ctx: RankContext, layer: Layer, width: int) -> int:
    """Dimensions of a head that turn: all, or the part that the table's `rope_part` says."""
    part = layer.words.get("rope_part")
    if part is not None:
        return int(width * part)
    for where in (ctx.model.text, ctx.model.text.get("rope_parameters") or {}):
        if where.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise RuntimeFault(
                f"config.json says partial_rotary_factor {where['partial_rotary_factor']}, but the family table "
                f"{ctx.model.family} has no rope_part"
            )
    return width
