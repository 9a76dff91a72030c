"""What one layer keeps of the tokens it has seen: keys and values, grown by doubling, or a recurrent state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shard_plans.errors import RuntimeFault

FIRST_CAPACITY = 64
"""Tokens that a new cache has room for at least."""


class LayerCache:
    """What attention keeps of the tokens of one sequence; one cache a layer and rank.

    Softmax attention appends tensors [tokens, ...]: keys and values after RoPE (GQA), or the latent (MLA). Linear
    attention replaces a state of fixed size (KDA). The block decides which, and of how many tensors.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        """An empty cache that stores in `dtype`; None: as computed."""
        self._dtype = dtype
        self._buffers: list[Tensor] = []
        self._state: list[Tensor] = []
        self._length = 0

    @property
    def length(self) -> int:
        """Tokens seen."""
        return self._length

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(buffer.numel() * buffer.element_size() for buffer in (*self._buffers, *self._state))

    def append(self, positions: Tensor, parts: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Keep `parts` ([new tokens, ...] each) at `positions` [new tokens]; return all positions and parts so far.

        Parts come back in the dtype in which they were given.
        """
        if self._state:
            raise RuntimeFault("KV cache: keeps a recurrent state, was given keys; use one cache for each layer")
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

    def recall(self) -> list[Tensor]:
        """The state as it was last put; nothing where no token was seen yet."""
        return list(self._state)

    def replace(self, positions: Tensor, parts: Sequence[Tensor]) -> None:
        """Keep `parts`, the state after the tokens at `positions`, in the place of the state before them.

        A state knows no positions, so they must go on where it stands. It is kept as computed, in its own dtype.
        """
        kept, given = ([tuple(part.shape) for part in state] for state in (self._state, parts))
        if self._buffers or (kept and kept != given):
            raise RuntimeFault(
                f"KV cache: keeps {kept or 'keys'}, was given a state of {given}; use one cache for each layer"
            )
        if not torch.equal(positions, torch.arange(len(positions), device=positions.device) + self._length):
            raise RuntimeFault(
                f"KV cache: a recurrent state of {self._length} tokens goes on at position {self._length}, was given "
                f"the {len(positions)} positions {positions[:3].tolist()}..."
            )
        self._state = list(parts)
        self._length += len(positions)

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens; a recurrent state can only be forgotten as a whole."""
        if not 0 <= length <= self._length:
            raise RuntimeFault(f"KV cache: can't cut {self._length} tokens to {length}")
        if self._state and length not in (0, self._length):
            raise RuntimeFault(f"KV cache: a recurrent state of {self._length} tokens can't be cut to {length}")
        if not length:
            self._state = []
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
