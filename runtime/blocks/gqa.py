"""Grouped-query attention."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.blocks.attention import attend
from runtime.blocks.beside import Beside
from runtime.blocks.block_index import index_keys, index_queries, pick_blocks
from runtime.blocks.cache import LayerCache
from runtime.blocks.context import RankContext
from runtime.blocks.linear import expect_shape, fused_linear, row_linear
from runtime.blocks.mask import Mask
from runtime.blocks.qk_norm import norm_heads, unit_heads
from runtime.blocks.rope import softmax_scale, turner
from runtime.blocks.weights import LayerWeights, dense, take
from shard_plans.errors import RuntimeFault
from shard_plans.families.model import Layer


def gqa(
    ctx: RankContext, layer: Layer, weights: LayerWeights, x: Tensor, cache: LayerCache | None, positions: Tensor,
    beside: Beside,
) -> Tensor:  # fmt: skip
    """Attention over x [T, hidden] at `positions` [T]: [T, hidden], summed over tp.

    Reads attn.qkv or attn.q, attn.k, attn.v; attn.q_norm and attn.k_norm where `qk_norm` has weights; attn.sinks
    [heads] where `sinks`; attn.o. Any may have a bias. Where KV heads are fewer than tp ranks, each rank holds the one
    head that its queries need. `output_gate: per_head`: attn.q gives each head's query, then its gate, whose sigmoid
    multiplies the head's output. With `index: block` a query sees the blocks of keys that block_index.py picks, and the
    cache keeps index keys too.
    """
    words, width = layer.words, ctx.size("head_dim")
    heads, kv_heads = ctx.share("heads"), local_kv_heads(ctx)
    wide = 2 * width if words.get("output_gate") == "per_head" else width
    rows = (heads * wide, kv_heads * width, kv_heads * width)
    q, k, v = fused_linear(ctx, weights, "attn.qkv", ("attn.q", "attn.k", "attn.v"), rows, x)
    q, gate = torch.split(q.view(x.shape[0], heads, wide), [width, wide - width], dim=-1)
    k, v = (part.view(x.shape[0], kv_heads, width) for part in (k, v))
    q, k = norm_heads(ctx, words.get("qk_norm"), weights, q, k)
    rotary = rotary_width(ctx, layer, width)
    turn = turner(words, ctx.model.text, rotary, positions, ctx.compute, beside.places)
    q, k = (unit_heads(ctx, words.get("qk_norm"), turn(part)) for part in (q, k))
    indexed = words.get("index") == "block"
    kept, seen = [k, v, *([index_keys(ctx, weights, x, turn)] if indexed else [])], positions
    if cache is not None:
        seen, kept = cache.append(positions, kept, words.get("window"), words.get("chunk"))
    k, v, picked = kept[0], kept[1], None
    if indexed:
        picked = pick_blocks(words, index_queries(ctx, weights, x, turn, kv_heads), kept[2], positions, seen)
    mask = Mask(positions, seen, words.get("window"), words.get("chunk"), picked)
    scale = softmax_scale(words, ctx.model.text, width)
    y = attend(tempered(ctx, layer, q, positions), k, v, scale, mask, sinks(ctx, layer, weights, heads))
    if gate.shape[-1]:
        y = (y * gate.reshape(y.shape).to(ctx.accumulate()).sigmoid()).to(ctx.compute)
    return row_linear(ctx, weights, "attn.o", y)


def tempered(ctx: RankContext, layer: Layer, q: Tensor, positions: Tensor) -> Tensor:
    """Queries times 1 + temperature * log(1 + floor((position + 1) / temperature_floor)); Llama 4, arXiv 2501.19399."""
    temperature: float | None = layer.words.get("temperature")
    if temperature is None:
        return q
    steps = ((positions.to(ctx.accumulate()) + 1) / layer.words["temperature_floor"]).floor()
    factor: Tensor = steps.log1p() * temperature + 1
    return (q * factor[:, None, None]).to(q.dtype)


def sinks(ctx: RankContext, layer: Layer, weights: LayerWeights, heads: int) -> Tensor | None:
    """One score for each of this rank's heads, where the word `sinks` says so."""
    if not layer.words.get("sinks"):
        return None
    scores = dense(take(weights, "attn.sinks"), ctx.accumulate())
    expect_shape("attn.sinks", scores, (heads,))
    return scores


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
