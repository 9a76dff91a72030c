"""Which keys a query sees."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """Causal: a key is seen from its own position on; windows, chunks and an indexer's picks limit that further."""

    positions: Tensor
    """Of the queries [T]."""
    seen: Tensor
    """Of the keys [S]."""
    window: int | None = None
    """A key is seen for so many positions, its own included."""
    chunk: int | None = None
    """Positions are cut into chunks of this length; a query sees keys of its own alone."""
    picked: Tensor | None = None
    """Keys that an indexer left, bool [T, S], or [KV heads, T, S]."""
    behind: Tensor | None = None
    """Further keys that lie behind those of tokens, bool [T, keys]: True where a query sees one."""

    def hidden(self, start: int, stop: int) -> Tensor:
        """True where a query of rows start to stop doesn't see a key: [rows, S], or [KV heads, 1, rows, S]."""
        rows = slice(start, stop)
        at = self.positions[rows, None]
        ago = at - self.seen
        hidden = ago < 0
        if self.window is not None:
            hidden = hidden | (ago >= self.window)
        if self.chunk is not None:
            hidden = hidden | (at // self.chunk != self.seen // self.chunk)
        if self.behind is not None:
            hidden = torch.cat([hidden, ~self.behind[rows]], dim=-1)
        if self.picked is None:
            return hidden
        picked = self.picked[..., rows, :]
        return hidden | ~(picked if picked.dim() == 2 else picked[:, None])
