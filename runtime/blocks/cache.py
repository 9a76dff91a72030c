"""What one layer keeps of the tokens of one sequence: keys and values in blocks, or a recurrent state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.blocks.pages import Pool
from shard_plans.errors import RuntimeFault


class LayerCache:
    """What attention keeps of one sequence; one cache a sequence, layer and rank.

    Softmax attention appends tensors [tokens, ...]: keys and values after RoPE (GQA), or the latent (MLA). They lie in
    blocks of a pool, which the table names in the order of the tokens. Linear attention replaces a state of fixed size
    (KDA). The block decides which, and of how many tensors.
    """

    def __init__(self, pool: Pool | None = None) -> None:
        """An empty cache of blocks of `pool`, or of a pool of its own."""
        self._pool = Pool() if pool is None else pool
        self.table: list[int] = []
        """Blocks of the pool, in the order of their tokens; those that no later token sees are gone."""
        self.gone = 0
        """Tokens that lay in blocks given back, all of them before those of the table."""
        self._state: list[Tensor] = []
        self._others: dict[str, LayerCache] = {}
        self._length = 0

    @property
    def length(self) -> int:
        """Tokens seen."""
        return self._length

    @property
    def nbytes(self) -> int:
        """Bytes held: whole blocks, and the state."""
        state = sum(part.numel() * part.element_size() for part in self._state)
        return len(self.table) * self._pool.block_bytes + state + sum(c.nbytes for c in self._others.values())

    def other(self, name: str) -> LayerCache:
        """A cache for something else that the layer keeps of the sequence, at another pace; freed with this one."""
        return self._others.setdefault(name, LayerCache(self._pool.other(name)))

    def append(
        self, positions: Tensor, parts: Sequence[Tensor], window: int | None = None, chunk: int | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Keep `parts` ([new tokens, ...] each) at `positions` [new tokens], which go on where the cache stands.

        Returns the positions and parts that the new tokens may see, in the dtypes in which parts were given. Blocks
        whose tokens lie outside the `window`, or before the `chunk`, of the first of them are given back, and never
        read again. RuntimeFault where there is no room, or the tensors aren't this layer's.
        """
        if self._state:
            raise RuntimeFault("KV cache: keeps a recurrent state, was given keys; use one cache for each layer")
        self._expect(positions)
        self._forget(first_seen(self._length, window, chunk))
        size, stop = self._pool.size, self._length + len(positions)
        self.table += self._pool.allocator.take(-(-(stop - self.gone) // size) - len(self.table))
        self._pool.write(self.table, self._length - self.gone, parts)
        self._length = stop
        seen = torch.arange(self.gone, stop, device=positions.device)
        return seen, self._pool.read(self.table, stop - self.gone, [part.dtype for part in parts])

    def recall(self) -> list[Tensor]:
        """The state as it was last put; nothing where no token was seen yet."""
        return list(self._state)

    def replace(self, positions: Tensor, parts: Sequence[Tensor]) -> None:
        """Keep `parts`, the state after the tokens at `positions`, in the place of the state before them.

        The positions go on where the state stands. It is kept as computed, in its own dtype; the first dimension of a
        part may change.
        """
        kept, given = ([tuple(part.shape[1:]) for part in state] for state in (self._state, parts))
        if self.table or (kept and kept != given):
            raise RuntimeFault(
                f"KV cache: keeps {kept or 'keys'}, was given a state of {given}; use one cache for each layer"
            )
        self._expect(positions)
        self._state = list(parts)
        self._length += len(positions)

    def free(self) -> None:
        """Forget the sequence; its blocks go back to the pool."""
        self._pool.allocator.give_back(self.table)
        for other in self._others.values():
            other.free()
        self.table, self.gone, self._state, self._length = [], 0, [], 0

    def _expect(self, positions: Tensor) -> None:
        if not torch.equal(positions, torch.arange(len(positions), device=positions.device) + self._length):
            raise RuntimeFault(
                f"KV cache: a sequence of {self._length} tokens goes on at position {self._length}, was given "
                f"the {len(positions)} positions {positions[:3].tolist()}..."
            )

    def _forget(self, first: int) -> None:
        """Give back the blocks whose tokens all lie before position `first`."""
        blocks = min((first - self.gone) // self._pool.size, len(self.table))
        if blocks > 0:
            self._pool.allocator.give_back(self.table[:blocks])
            del self.table[:blocks]
            self.gone += blocks * self._pool.size


def first_seen(position: int, window: int | None, chunk: int | None) -> int:
    """The first position that a query at `position`, or a later one, sees."""
    first = 0 if window is None else position - window + 1
    return max(first, 0 if chunk is None else position // chunk * chunk)
