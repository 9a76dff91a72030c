"""The gated delta rule of linear attention with a decay for each head and channel (Kimi Delta Attention).

A decay for each head alone (Gated DeltaNet) is the same with all channels alike.

A head keeps a state S [key width, value width]. At each token S fades, channel by channel of the key; what the key k
finds in it is corrected towards the value v; the query q reads it:

    S <- exp(g) * S;   S <- S + beta k (v - S^T k)^T;   o = S^T q

Both functions take q, k, g [heads, tokens, key width], v [heads, tokens, value width], beta [heads, tokens] and the
state [heads, key width, value width], all in one dtype, g <= 0; and return o [heads, tokens, value width] and the state
after the last token.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 16
"""Tokens taken at once. Memory goes with its square: heads * CHUNK^2 * key width numbers."""

LENGTH_EPS = 1e-6
"""Added to the squared length of queries and keys before the root."""


def unit_length(x: Tensor) -> Tensor:
    """Vectors of the last dimension divided by their length."""
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + LENGTH_EPS)


def recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Token after token, as written above: the form for decoding."""
    outputs = []
    for token in range(q.shape[1]):
        state = g[:, token].exp()[..., None] * state
        key = k[:, token, :, None]
        correction = beta[:, token, None] * (v[:, token] - (key * state).sum(1))
        state = state + key * correction[:, None]
        outputs.append((q[:, token, :, None] * state).sum(1))
    return torch.stack(outputs, dim=1) if outputs else torch.zeros_like(v), state


def chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """CHUNK tokens at once: the form for prefill. Equal to `recurrent` up to rounding.

    With S0 the state before the chunk and c_s the correction (times beta) at token s, the state after token t is
    fade(0, t) * S0 + sum over s <= t of (fade(s, t) * k_s) c_s^T. Put into the rule, that makes the corrections the
    solution of a unit lower triangular system.
    """
    outputs = []
    for start in range(0, q.shape[1], CHUNK):
        piece = slice(start, start + CHUNK)
        o, state = _chunk(q[:, piece], k[:, piece], v[:, piece], g[:, piece], beta[:, piece, None], state)
        outputs.append(o)
    return torch.cat(outputs, dim=1) if outputs else torch.zeros_like(v), state


def _chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    place = torch.arange(q.shape[1], device=q.device)
    # Sums between two tokens are added up from their own terms: differences of sums from the start would lose digits,
    # and quotients of their exponentials overflow.
    between = (g[:, :, None] * (place[:, None] > place)[..., None]).cumsum(1)
    faded = k[:, None] * between.exp() * (place[:, None] >= place)[..., None]  # [heads, t, s, width]: k_s seen from t
    since = g.cumsum(1).exp()
    found = (faded @ k[..., None])[..., 0]
    right = beta * (v - (since * k) @ state)
    corrections = torch.linalg.solve_triangular((beta * found).tril(-1), right, upper=False, unitriangular=True)
    o = (since * q) @ state + (faded @ q[..., None])[..., 0] @ corrections
    return o, since[:, -1, :, None] * state + faded[:, -1].transpose(1, 2) @ corrections
