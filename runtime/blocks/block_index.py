"""MiniMax-M3's indexer: scores of its own choose blocks of keys, for each group of heads apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from runtime.blocks import attention
from runtime.blocks.context import RankContext
from runtime.blocks.linear import column_linear
from runtime.blocks.norms import model_norm
from runtime.blocks.weights import LayerWeights
from shard_plans.errors import RuntimeFault

Turn = Callable[[Tensor], Tensor]


def index_keys(ctx: RankContext, weights: LayerWeights, x: Tensor, turn: Turn) -> Tensor:
    """Index keys of tokens x [T, hidden]: [T, width], one for all heads. Reads index.k and index.k_norm."""
    keys = model_norm(ctx, weights, "index.k_norm", column_linear(ctx, weights, "index.k", x))
    return turn(keys[:, None])[:, 0]


def index_queries(ctx: RankContext, weights: LayerWeights, x: Tensor, turn: Turn, kv_heads: int) -> Tensor:
    """Index queries [T, KV heads of this rank, width]; reads index.q and index.q_norm, whole on every rank.

    There is one index head for each KV head, or for several.
    """
    heads, width, every = ctx.size("index_heads"), ctx.size("index_dim"), ctx.size("kv_heads")
    if every % heads:
        raise RuntimeFault(f"{heads} index heads don't divide {every} KV heads")
    queries = column_linear(ctx, weights, "index.q", x).view(-1, heads, width)
    first = ctx.at.tp * every // ctx.grid.tp
    mine = [head * heads // every for head in range(first, first + kv_heads)]
    return turn(model_norm(ctx, weights, "index.q_norm", queries[:, mine]))


def pick_blocks(words: Mapping[str, Any], queries: Tensor, keys: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
    """True for the keys [S, width] that queries [T, heads, width] see: [heads, T, S], before causality.

    A block of `index_block` positions scores as its best key does. `index_topk` blocks are seen, first of all the last
    `index_local` ones up to the query's own.
    """
    size, local = int(words["index_block"]), int(words.get("index_local") or 0)
    wide = torch.promote_types(queries.dtype, torch.float32)
    block = seen // size
    count = int(block.max()) + 1 if len(seen) else 0
    topk = min(int(words["index_topk"]), count)
    tokens, heads = queries.shape[:2]
    found = []
    step = max(1, attention.SCORES_AT_ONCE // max(1, heads * len(seen)))
    for start in range(0, tokens, step):
        rows = slice(start, start + step)
        at = positions[rows]
        scores = torch.matmul(queries[rows].to(wide).transpose(0, 1), keys.to(wide).T)
        scores = scores.masked_fill(at[:, None] < seen, float("-inf"))
        best = scores.new_full((*scores.shape[:2], count), float("-inf"))
        best.scatter_reduce_(-1, block.expand_as(scores), scores, "amax")
        ago = (at // size)[:, None] - torch.arange(count, device=at.device)
        best = best.masked_fill((ago >= 0) & (ago < local), float("inf"))
        chosen = best.sort(dim=-1, descending=True, stable=True).indices[..., :topk]
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, chosen, True)
        found.append(kept[..., block])
    return torch.cat(found, dim=1) if found else seen.new_zeros((heads, 0, len(seen)), dtype=torch.bool)
