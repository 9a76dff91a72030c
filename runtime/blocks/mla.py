"""Multi-head latent attention (DeepSeek-V2 and later)."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.blocks.attention import attend
from runtime.blocks.beside import Beside
from runtime.blocks.cache import LayerCache
from runtime.blocks.context import RankContext
from runtime.blocks.linear import column_linear, output_gate, row_linear
from runtime.blocks.mask import Mask
from runtime.blocks.norms import weighted_norm
from runtime.blocks.rope import softmax_scale, turner
from runtime.blocks.sparse_index import index, left, pick
from runtime.blocks.weights import LayerWeights
from shard_plans.errors import RuntimeFault
from shard_plans.families.model import Layer


def mla(
    ctx: RankContext, layer: Layer, weights: LayerWeights, x: Tensor, cache: LayerCache | None, positions: Tensor,
    beside: Beside,
) -> Tensor:  # fmt: skip
    """Attention over x [T, hidden] at `positions` [T]: [T, hidden], summed over tp.

    Reads attn.q, or attn.q_a, attn.q_a_norm and attn.q_b; attn.kv_a, attn.kv_a_norm, attn.kv_b, attn.o; attn.gate
    where `output_gate: elementwise`. Low-rank products are whole on every rank, heads are dealt. The cache keeps
    kv_lora + rope numbers a token: the normed latent and the shared key after RoPE (`rope: none`: as it is). With
    `index: dsa` a query sees what its index picks, and the cache keeps the index's keys too; `index: previous` sees
    what the indexer of a layer before it picked.
    """
    words, text, low = layer.words, ctx.model.text, None
    heads, nope, rope = ctx.share("heads"), ctx.size("nope"), ctx.size("rope")
    kv_lora, v_dim, latent_eps = ctx.size("kv_lora"), ctx.size("v_dim"), words["latent_eps"]
    if ctx.model.sizes.get("q_lora"):
        low = column_linear(ctx, weights, "attn.q_a", x)
        low = weighted_norm(ctx, weights, "attn.q_a_norm", low, latent_eps)
        q = column_linear(ctx, weights, "attn.q_b", low)
    else:
        q = column_linear(ctx, weights, "attn.q", x)
    q_pass, q_turn = torch.split(q.view(-1, heads, nope + rope), [nope, rope], dim=-1)
    latent, k_turn = torch.split(column_linear(ctx, weights, "attn.kv_a", x), [kv_lora, rope], dim=-1)
    latent = weighted_norm(ctx, weights, "attn.kv_a_norm", latent, latent_eps)
    turn = turner(words, text, rope, positions, ctx.compute)
    q = torch.cat([q_pass, turn(q_turn)], dim=-1)
    latent = torch.cat([latent, turn(k_turn[:, None])[:, 0]], dim=-1)
    kept, seen = [latent], positions
    found = None if words.get("index") != "dsa" else index(ctx, words, weights, x, _low(low), positions)
    if found is not None:
        kept.append(found.keys)
    if cache is not None:
        window = words.get("window") if words.get("index") is None else None  # picks count from the first token
        seen, kept = cache.append(positions, kept, window)
    latent = kept[0]
    if found is not None:
        beside.picked = pick(ctx, words["index_topk"], found, kept[1], positions, seen)
    kv = column_linear(ctx, weights, "attn.kv_b", latent[:, :kv_lora]).view(-1, heads, nope + v_dim)
    k_pass, v = torch.split(kv, [nope, v_dim], dim=-1)
    k = torch.cat([k_pass, latent[:, None, kv_lora:].expand(-1, heads, -1)], dim=-1)
    scale = softmax_scale(words, text, nope + rope)
    picked = None if words.get("index") is None else left(_picked(beside), len(seen))
    y = attend(q, k, v, scale, Mask(positions, seen, words.get("window"), picked=picked))
    if words.get("output_gate") == "elementwise":
        y = output_gate(ctx, weights, "attn.gate", x, y)
    return row_linear(ctx, weights, "attn.o", y)


def _low(low: Tensor | None) -> Tensor:
    if low is None:
        raise RuntimeFault("an indexer reads the low-rank queries, and the model has none (q_lora_rank)")
    return low


def _picked(beside: Beside) -> Tensor:
    if beside.picked is None:
        raise RuntimeFault("the layer sees what an indexer before it picked, and there is none")
    return beside.picked
