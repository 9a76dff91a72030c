"""Softmax attention: the core that grouped-query, latent and image attention share."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.blocks.mask import Mask

SCORES_AT_ONCE = 1 << 26
"""Attention scores (heads x queries x keys) held in memory at a time."""


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Mask | None, sinks: Tensor | None = None) -> Tensor:
    """Softmax attention of q [T, heads, d] over k [S, kv, d] and v [S, kv, dv]; without a mask every key is seen.

    Query head h reads KV head h // (heads / kv). `sinks` [heads] are scores that take part in the softmax and bring no
    value. Softmax in float32 or higher. Returns [T, heads * dv].
    """
    tokens, heads, width = q.shape
    keys, kv_heads, value_width = v.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = q.transpose(0, 1).reshape(kv_heads, heads // kv_heads, tokens, width)
    k, v = k.permute(1, 2, 0)[:, None], v.transpose(0, 1)[:, None]
    outputs = []
    step = max(1, SCORES_AT_ONCE // max(1, heads * keys))
    for start in range(0, tokens, step):
        scores = (torch.matmul(grouped[:, :, start : start + step], k) * scale).to(wide)
        if mask is not None:
            scores = scores.masked_fill(mask.hidden(start, start + step), float("-inf"))
        if sinks is not None:
            drain = sinks.to(wide).view(kv_heads, -1, 1, 1).expand(-1, -1, scores.shape[2], 1)
            shares = torch.cat([scores, drain], dim=-1).softmax(-1)[..., :-1]
        else:
            shares = scores.softmax(-1)
        outputs.append(torch.matmul(shares.to(q.dtype), v))
    if not outputs:
        return q.new_zeros((0, heads * value_width))
    return torch.cat(outputs, dim=2).reshape(heads, tokens, value_width).transpose(0, 1).reshape(tokens, -1)
