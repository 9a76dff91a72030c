"""What a pass knows of its tokens beside the stream."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class Beside:
    """What blocks of one pass read of the tokens, or leave for later ones; one a rank and pass."""

    ids: Tensor | None = None
    """Token ids [T], for a router that looks experts up."""
    places: Tensor | None = None
    """Frame, row and column [3, T] for `rope: mrope_interleaved`; None: all three are the token's position."""
    picked: Tensor | None = None
    """What the last indexer picked [T, k], by place among the tokens seen; `index: previous` reads it."""
    tokens: Tensor | None = None
    """Which tokens stand for pieces of images [n]."""
    deep: Tensor | None = None
    """What is added to these behind the first layers, one after the other [layers, n, hidden]."""
