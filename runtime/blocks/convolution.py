"""The short causal convolution in front of linear attention."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def convolve(x: Tensor, taps: Tensor) -> Tensor:
    """Causal convolution of every channel, then SiLU: x [taps - 1 + T, channels], taps [channels, taps]: [T, channels].

    The last tap multiplies the token itself, the first the one taps - 1 before it.
    """
    count = taps.shape[1]
    tokens = x.shape[0] - count + 1
    y = x[:tokens] * taps[:, 0]
    for tap in range(1, count):
        y = y + x[tap : tap + tokens] * taps[:, tap]
    return functional.silu(y)
