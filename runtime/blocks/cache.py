"""The key-value cache of one layer: contiguous, grown by doubling."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shard_plans.errors import RuntimeFault

FIRST_CAPACITY = 64
"""Tokens that a new cache has room for at least."""


class LayerCache:
    """What attention keeps of the tokens it has seen: keys and values after RoPE (GQA), or the latent (MLA).

    The tensors are [tokens, ...]; the block that appends decides which and how many. One cache a layer and rank.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        """An empty cache that stores in `dtype`; None: as computed."""
        self._dtype = dtype
        self._buffers: list[Tensor] = []
        self._length = 0

    @property
    def length(self) -> int:
        """Tokens kept."""
        return self._length

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers)

    def append(self, positions: Tensor, parts: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Keep `parts` ([new tokens, ...] each) at `positions` [new tokens]; return all positions and parts so far.

        Parts come back in the dtype in which they were given.
        """
        new = [positions, *parts]
        if not self._buffers:
            kinds = [positions.dtype, *(part.dtype if self._dtype is None else self._dtype for part in parts)]
            self._buffers = [x.new_empty((0, *x.shape[1:]), dtype=kind) for x, kind in zip(new, kinds, strict=True)]
        kept = [tuple(buffer.shape[1:]) for buffer in self._buffers]
        given = [tuple(x.shape[1:]) for x in new]
        if kept != given or any(x.shape[0] != positions.shape[0] for x in parts):
            raise RuntimeFault(
                f"KV cache: keeps {kept[1:]} a token, was given {given[1:]} for {positions.shape[0]} tokens; "
                "use one cache for each layer"
            )
        start, stop = self._length, self._length + positions.shape[0]
        self._reserve(stop)
        for buffer, x in zip(self._buffers, new, strict=True):
            buffer[start:stop] = x
        self._length = stop
        views = [buffer[:stop] for buffer in self._buffers]
        return views[0], [view.to(part.dtype) for view, part in zip(views[1:], parts, strict=True)]

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        if not 0 <= length <= self._length:
            raise RuntimeFault(f"KV cache: can't cut {self._length} tokens to {length}")
        self._length = length

    def _reserve(self, tokens: int) -> None:
        capacity = self._buffers[0].shape[0]
        if tokens <= capacity:
            return
        capacity = max(tokens, 2 * capacity, FIRST_CAPACITY)
        for number, buffer in enumerate(self._buffers):
            grown = buffer.new_empty((capacity, *buffer.shape[1:]))
            grown[: self._length] = buffer[: self._length]
            self._buffers[number] = grown
