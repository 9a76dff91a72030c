"""What a pass knows of its tokens beside the stream."""

from __future__ import annotations

from dataclasses import dataclass

import torch
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

    def rows(self, start: int, stop: int) -> Beside:
        """The same of tokens start to stop of a prefill alone, as a pass behind the first `start` tokens knows it."""
        here = torch.arange(start, stop)
        picked, tokens, deep = self.picked, self.tokens, self.deep
        if picked is not None:  # a query with fewer keys behind it than are picked has others in its list, still hidden
            picked = torch.minimum(picked[start:stop], here[:, None].to(picked.device))
        if tokens is not None:
            kept = (tokens >= start) & (tokens < stop)
            deep = None if deep is None else deep[:, kept]
            tokens = tokens[kept] - start
        return Beside(
            None if self.ids is None else self.ids[start:stop],
            None if self.places is None else self.places[:, start:stop], picked, tokens, deep,
        )  # fmt: skip
