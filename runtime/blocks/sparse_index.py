"""DeepSeek sparse attention's indexer: a few heads of its own score all keys, and a query sees the best of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runtime.blocks import attention
from runtime.blocks.context import RankContext
from runtime.blocks.linear import column_linear
from runtime.blocks.norms import biased_norm
from runtime.blocks.rope import make_rope, rotate
from runtime.blocks.weights import LayerWeights

NORM_EPS = 1e-6
"""Of the LayerNorm of index keys, whatever config.json says."""


@dataclass(frozen=True, slots=True, eq=False)
class Index:
    """What one layer's indexer makes of the new tokens."""

    queries: Tensor
    """[T, index heads, width]."""
    keys: Tensor
    """[T, width]: one for all heads, and what a cache keeps."""
    shares: Tensor
    """[T, index heads]: how much each head's score counts."""


def index(
    ctx: RankContext, words: Mapping[str, Any], weights: LayerWeights, x: Tensor, low: Tensor, positions: Tensor
) -> Index:
    """The index of tokens x [T, hidden], whose low-rank queries are `low` [T, q_lora]; whole on every rank.

    Reads index.q, index.k, index.k_norm and its bias, index.weights. The first `rope` dimensions turn, in the pairs
    that `index_rope` says, which need not be those of attention. The published code also turns both by a Hadamard
    matrix, which leaves their products as they are.
    """
    heads, width = ctx.size("index_heads"), ctx.size("index_dim")
    queries = column_linear(ctx, weights, "index.q", low).view(-1, heads, width)
    keys = column_linear(ctx, weights, "index.k", x)
    keys = biased_norm(ctx, weights, "index.k_norm", keys, NORM_EPS)
    turns = make_rope(ctx.model.text, ctx.size("rope"), ctx.compute, x.device).turns(positions, ctx.compute)
    queries, keys = (rotate(words["index_rope"], part, *turns) for part in (queries, keys[:, None]))
    shares = column_linear(ctx, weights, "index.weights", x).to(ctx.accumulate())
    return Index(queries, keys[:, 0], shares * float(heads**-0.5))


def pick(ctx: RankContext, topk: int, found: Index, keys: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
    """The `topk` keys [S, width] with the best scores for each query, by place among those seen [T, k].

    A score is the sum over heads of share * relu(q k) / sqrt(width); of equal ones, and 0 is common, the earlier key is
    picked. Where fewer keys than `topk` lie behind a query, some of what is picked lies before it, and stays hidden.
    """
    wide, (tokens, heads) = ctx.accumulate(), found.shares.shape
    keys, scale, picked = keys.to(wide), float(keys.shape[1] ** -0.5), []
    step = max(1, attention.SCORES_AT_ONCE // max(1, heads * len(keys)))
    for start in range(0, tokens, step):
        rows = slice(start, start + step)
        products = torch.matmul(found.queries[rows].to(wide), keys.T) * scale
        scores = (found.shares[rows, :, None] * products.relu_()).sum(1)
        scores = scores.masked_fill(positions[rows, None] < seen, float("-inf"))
        picked.append(scores.sort(dim=-1, descending=True, stable=True).indices[:, :topk])
    return torch.cat(picked) if picked else seen.new_zeros((0, min(topk, len(keys))))


def left(picked: Tensor, keys: int) -> Tensor:
    """True for the picked ones of so many keys [T, keys]."""
    kept = torch.zeros((picked.shape[0], keys), dtype=torch.bool, device=picked.device)
    return kept.scatter_(1, picked, True)
