"""DeepSeek-V4's compressor: windows of tokens become one key, which is its value too."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.blocks.cache import LayerCache
from runtime.blocks.context import RankContext
from runtime.blocks.linear import column_linear, expect_shape
from runtime.blocks.norms import model_norm
from runtime.blocks.rope import Rope, rotate_tail
from runtime.blocks.weights import LayerWeights, dense, take


def compressed_keys(
    ctx: RankContext, weights: LayerWeights, group: str, x: Tensor, cache: LayerCache | None, positions: Tensor,
    every: int, overlap: int, rope: Rope,
) -> Tensor:  # fmt: skip
    """One key for every `every` of all tokens up to x [T, hidden]: [tokens so far // every, width].

    Windows are made of GROUP.kv and GROUP.gate times their tokens. The cache keeps the keys of full windows, and these
    products for the tokens that later keys need: of the window that isn't full, and of overlap - 1 before it.
    """
    kv, gate = (column_linear(ctx, weights, f"{group}.{role}", x) for role in ("kv", "gate"))
    if cache is None:
        return compress(ctx, weights, group, kv, gate, every, overlap, rope)
    keys, left = cache.other(group), cache.other(f"{group}.tokens")
    first = max(0, keys.length - overlap + 1)
    if left.length:
        kv, gate = (torch.cat(pair) for pair in zip(left.recall(), (kv, gate), strict=True))
    new = compress(ctx, weights, group, kv, gate, every, overlap, rope, first)[keys.length - first :]
    places = torch.arange(keys.length, keys.length + len(new), device=x.device)
    _, (every_key,) = keys.append(places, [new])
    gone = (max(0, keys.length - overlap + 1) - first) * every
    left.replace(positions, [kv[gone:].clone(), gate[gone:].clone()])
    return every_key


def compress(
    ctx: RankContext, weights: LayerWeights, group: str, kv: Tensor, gate: Tensor, every: int, overlap: int,
    rope: Rope, first: int = 0,
) -> Tensor:  # fmt: skip
    """One key for every `every` tokens from window number `first` on: [tokens // every, width].

    A channel is the mean of the window's, weighed by the softmax of gate + GROUP.pos; then GROUP.norm and RoPE at the
    window's first position. With an overlap of 2 a token has two halves: the first counts in the window behind its own,
    the second in its own (arXiv of DeepSeek-V4, eqs. 9 to 12 and 20 to 23).
    """
    windows, width = len(kv) // every, kv.shape[1] // overlap
    wide = ctx.accumulate()
    place = dense(take(weights, f"{group}.pos"), wide)
    expect_shape(f"{group}.pos", place, (every, kv.shape[1]))
    values = kv[: windows * every].view(windows, every, kv.shape[1])
    scores = gate[: windows * every].view(windows, every, kv.shape[1]).to(wide) + place
    if overlap == 2:
        values = _with_previous(values, width, 0.0)
        scores = _with_previous(scores, width, float("-inf"))
    mixed = (values * scores.softmax(1).to(values.dtype)).sum(1)
    keys = model_norm(ctx, weights, f"{group}.norm", mixed)
    turns = rope.turns((torch.arange(windows, device=kv.device) + first) * every, ctx.compute)
    return rotate_tail(keys[:, None], *turns)[:, 0]


def _with_previous(x: Tensor, width: int, nothing: float) -> Tensor:
    """[windows, 2 * every, width]: first halves of the window before (the first has none), second halves of its own."""
    before = torch.cat([torch.full_like(x[:1, :, :width], nothing), x[:-1, :, :width]])
    return torch.cat([before[: len(x)], x[..., width:]], dim=1)
