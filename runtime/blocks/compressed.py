"""DeepSeek-V4's attention: one KV head, a window of tokens as they are, and compressed keys of all before."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.blocks import sparse_index
from runtime.blocks.attention import attend
from runtime.blocks.beside import Beside
from runtime.blocks.cache import LayerCache
from runtime.blocks.compressor import compressed_keys
from runtime.blocks.context import RankContext
from runtime.blocks.linear import check_inner, column_linear, expect_shape, row_linear
from runtime.blocks.mask import Mask
from runtime.blocks.norms import model_norm, unit_rms
from runtime.blocks.rope import make_rope, of_kind, rotate_tail
from runtime.blocks.weights import LayerWeights, dense, take
from shard_plans.families.model import Layer


def compressed(
    ctx: RankContext, layer: Layer, weights: LayerWeights, x: Tensor, cache: LayerCache | None, positions: Tensor,
    beside: Beside,
) -> Tensor:  # fmt: skip
    """Attention over x [T, hidden] at `positions` [T]: [T, hidden], summed over tp; groups of heads are dealt.

    Reads attn.q_a, q_a_norm, q_b, kv, kv_norm, sinks, o_a, o_b; compress.* where `compress` tokens make one more key,
    and index.* where an indexer picks `index_topk` of these. A key is its value; RoPE turns its last dimensions, and
    turns the output back. The cache keeps the keys of the window, and what compressor.py says.
    """
    words, width, heads = layer.words, ctx.size("head_dim"), ctx.share("groups") * ctx.size("group_heads")
    text = of_kind(ctx.model.text, words["rope_kind"])
    rope = make_rope(text, ctx.size("rope"), ctx.compute, x.device)
    turns = rope.turns(positions, ctx.compute)
    low = model_norm(ctx, weights, "attn.q_a_norm", column_linear(ctx, weights, "attn.q_a", x))
    q = column_linear(ctx, weights, "attn.q_b", low).view(-1, heads, width)
    q = rotate_tail(unit_rms(q, ctx.model.words["eps"]).to(ctx.compute), *turns)
    key = model_norm(ctx, weights, "attn.kv_norm", column_linear(ctx, weights, "attn.kv", x))
    kept = [rotate_tail(key[:, None], *turns)[:, 0]]
    seen = positions
    if cache is not None:
        seen, kept = cache.append(positions, kept, words["window"])
    keys, behind = kept[0], None
    if every := int(words.get("compress") or 0):
        overlap = int(words.get("overlap") or 1)
        more = compressed_keys(ctx, weights, "compress", x, cache, positions, every, overlap, rope)
        ends = (torch.arange(len(more), device=x.device) + 1) * every - 1
        behind = ends <= positions[:, None]
        if words.get("index_topk") is not None:
            small = compressed_keys(ctx, weights, "index", x, cache, positions, every, overlap, rope)
            behind = behind & picked(ctx, layer, weights, x, low, small, ends, positions, turns)
        keys = torch.cat([keys, more])
    sinks = dense(take(weights, "attn.sinks"), ctx.accumulate())
    expect_shape("attn.sinks", sinks, (heads,))
    mask = Mask(positions, seen, words["window"], behind=behind)
    y = attend(q, keys[:, None], keys[:, None], float(width**-0.5), mask, sinks).view(-1, heads, width)
    return output(ctx, weights, rotate_tail(y, turns[0], -turns[1]))


def picked(
    ctx: RankContext, layer: Layer, weights: LayerWeights, x: Tensor, low: Tensor, keys: Tensor, ends: Tensor,
    positions: Tensor, turns: tuple[Tensor, Tensor],
) -> Tensor:  # fmt: skip
    """True for the compressed keys that each query sees [T, keys]; reads index.q and index.weights."""
    heads = ctx.size("index_heads")
    queries = column_linear(ctx, weights, "index.q", low).view(-1, heads, ctx.size("index_dim"))
    shares = column_linear(ctx, weights, "index.weights", x).to(ctx.accumulate()) * float(heads**-0.5)
    found = sparse_index.Index(rotate_tail(queries, *turns), keys, shares)
    best = sparse_index.pick(ctx, int(layer.words["index_topk"]), found, keys, positions, ends)
    return sparse_index.left(best, len(keys))


def output(ctx: RankContext, weights: LayerWeights, y: Tensor) -> Tensor:
    """Heads y [T, heads, width] to [T, hidden]: a matrix of attn.o_a for each group of heads, then attn.o_b."""
    groups, rank = ctx.share("groups"), ctx.size("o_lora")
    matrix = dense(take(weights, "attn.o_a"), ctx.compute)
    grouped = y.reshape(len(y), groups, -1)
    check_inner("attn.o_a", matrix, grouped)
    expect_shape("attn.o_a", matrix, (groups * rank, grouped.shape[-1]))
    low = ctx.pulse.saw("attn.o_a", torch.einsum("tgi,goi->tgo", grouped, matrix.view(groups, rank, -1)))
    return row_linear(ctx, weights, "attn.o_b", low.reshape(len(y), -1))
