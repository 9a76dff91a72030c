"""The residual stream: what a token carries from layer to layer, and what each block sees of it.

`plain`: one vector [T, hidden], to which every block adds. `attn_res` (attention residuals): [T, 1 + bank, hidden], the
running sum in front of a bank of earlier sums. Every block sees a mixture of all of them, by weights of its own, and
adds to the sum. Each `res_block` layers the sum goes to the bank, and starts again from what attention adds. `hyper`
(hyper-connections, hyper.py): [T, streams, hidden], all alike at first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from runtime.blocks import hyper
from runtime.blocks.context import RankContext
from runtime.blocks.weights import LayerWeights, dense, take
from shard_plans.families.model import Layer, Model


def vectors(model: Model, layer: int) -> int | None:
    """Vectors that a token carries into layer number `layer` (the number of layers: out of the last); None if plain."""
    if model.words.get("stream") == "hyper":
        return int(model.words["streams"])
    if model.words.get("stream") != "attn_res":
        return None
    return 1 + -(-layer // int(model.words["res_block"]))


def shape(model: Model, tokens: int, layer: int) -> tuple[int, ...]:
    """Shape of the stream into layer number `layer`."""
    count, hidden = vectors(model, layer), model.sizes["hidden"]
    return (tokens, hidden) if count is None else (tokens, count, hidden)


def begin(model: Model, x: Tensor) -> Tensor:
    """The stream of embeddings x [T, hidden]."""
    count = vectors(model, 0)
    return x if count is None else x[:, None].expand(-1, count, -1)


def carry(model: Model, layer: Layer, x: Tensor) -> Tensor:
    """What the layer hands on of the stream x before its blocks add to it; its first block has seen x as it was."""
    if model.words.get("stream") != "attn_res" or layer.index % int(model.words["res_block"]):
        return x
    return torch.cat([torch.zeros_like(x[:, :1]), x[:, 1:], x[:, :1]], dim=1)


def add(x: Tensor, y: Tensor) -> Tensor:
    """The stream with a block's output y [T, hidden] added."""
    return x + y if x.dim() == 2 else torch.cat([x[:, :1] + y[:, None], x[:, 1:]], dim=1)


def enter(
    ctx: RankContext, layer: Layer, weights: LayerWeights, block: str, x: Tensor
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """What `block` (attn or ffn) sees of the stream x [T, hidden], and what gives the stream with its output added."""
    if ctx.model.words.get("stream") == "hyper":
        h, shares, mixed = hyper.enter(ctx, weights, block, x)
        return h, lambda y: shares[..., None] * y[:, None] + mixed
    kept = carry(ctx.model, layer, x) if block == "attn" else x
    return seen(ctx, weights, block, x), partial(add, kept)


def seen(ctx: RankContext, weights: LayerWeights, block: str, x: Tensor) -> Tensor:
    """What `block` (attn, ffn, or out for the head) sees of the stream [T, hidden].

    attn_res reads BLOCK.res_norm [hidden] and BLOCK.res_proj [1, hidden]: each vector's score is its norm times both,
    the softmax of the scores weighs the vectors as they are. Without a bank that is the sum, whatever the weights.
    """
    if vectors(ctx.model, 0) is None:
        return x
    if ctx.model.words["stream"] == "hyper":
        return hyper.leave(ctx, weights, x)
    wide = ctx.accumulate()
    norm, proj = (dense(take(weights, f"{block}.{role}"), wide) for role in ("res_norm", "res_proj"))
    if x.shape[1] == 1:
        return x[:, 0]
    v = x.to(wide)
    normed = v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + ctx.model.words["eps"])
    shares = (normed * norm * proj[0]).sum(-1).softmax(-1)
    return (shares[..., None] * v).sum(1).to(x.dtype)
