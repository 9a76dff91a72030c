"""The tokens of one sequence that a pass runs: a whole prompt, a chunk of it, or one token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.blocks.beside import Beside
from runtime.blocks.cache import LayerCache

Caches = Mapping[int, LayerCache]
"""Layer number -> what it keeps of one sequence, for the layers of the rank's stage."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Some tokens of a sequence; a pass runs pieces of several, whose rows lie one piece behind the other."""

    positions: Tensor
    """[T] in the sequence."""
    beside: Beside
    caches: Caches | None = None
    """What was kept of the tokens before; None: there are none, and nothing is kept."""

    def cache(self, layer: int) -> LayerCache | None:
        """Of one layer."""
        return None if self.caches is None else self.caches[layer]


def tokens_of(pieces: Sequence[Piece]) -> int:
    """Rows of the stream."""
    return sum(len(piece.positions) for piece in pieces)


def ids_of(pieces: Sequence[Piece]) -> Tensor | None:
    """Token ids of all rows; None where they aren't known."""
    ids = [piece.beside.ids for piece in pieces if piece.beside.ids is not None]
    if len(ids) < 2:
        return ids[0] if ids else None
    return torch.cat(ids)
