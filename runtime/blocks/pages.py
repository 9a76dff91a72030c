"""The blocks that caches of one layer are made of: which are free, and what lies in them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from runtime.blocks.kv_format import KvFormat
from shard_plans.errors import RuntimeFault

BLOCK = 16
"""Tokens of a block where nothing is said."""


class Allocator:
    """Hands out the numbers of blocks; a number has one owner until it is given back."""

    def __init__(self, limit: int | None = None) -> None:
        """`limit`: how many blocks there are; None: as many as are asked for."""
        self.limit = limit
        self.made = 0
        """Blocks handed out at least once: 0 to made - 1."""
        self._free: list[int] = []
        self._held: set[int] = set()

    @property
    def held(self) -> int:
        """Blocks that have an owner."""
        return len(self._held)

    def take(self, count: int) -> list[int]:
        """`count` blocks, or RuntimeFault and none. One that was given back is used again first."""
        left = None if self.limit is None else self.limit - len(self._held)
        if left is not None and count > left:
            raise RuntimeFault(
                f"KV cache: {count} more blocks are needed and {left} of {self.limit} are free; give more blocks "
                "(--kv-blocks), or fewer or shorter prompts"
            )
        again = [self._free.pop() for _ in range(min(count, len(self._free)))]
        new = list(range(self.made, self.made + count - len(again)))
        self.made += len(new)
        self._held.update(again, new)
        return again + new

    def give_back(self, blocks: Iterable[int]) -> None:
        """Free blocks; RuntimeFault for one that has no owner."""
        for block in blocks:
            if block not in self._held:
                raise RuntimeFault(f"KV cache: block {block} was given back and isn't held; it was given back twice")
            self._held.remove(block)
            self._free.append(block)


class Pool:
    """The blocks of one layer and rank, which the sequences share; each has room for `size` tokens."""

    def __init__(self, size: int = BLOCK, limit: int | None = None, format: KvFormat | None = None) -> None:
        """No memory is taken yet: that is done when the first tensors say what a token takes.

        `limit` blocks are reserved at once then; without one the room is doubled when it is full. `format`: None to
        store as computed.
        """
        self.size, self.format = size, format
        self.allocator = Allocator(limit)
        self._rooms: list[list[Tensor]] = []
        self._others: dict[str, Pool] = {}

    def other(self, name: str) -> Pool:
        """A pool for something else that the layer keeps at another pace."""
        return self._others.setdefault(name, Pool(self.size, None, self.format))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of this pool; 0 before anything was stored."""
        return sum(math.prod(room.shape[1:]) * room.element_size() for rooms in self._rooms for room in rooms)

    @property
    def reserved(self) -> int:
        """Bytes of memory taken, free blocks included."""
        own = sum(room.numel() * room.element_size() for rooms in self._rooms for room in rooms)
        return own + sum(pool.reserved for pool in self._others.values())

    def write(self, blocks: Sequence[int], start: int, parts: Sequence[Tensor]) -> None:
        """Put `parts` [tokens, ...] behind the first `start` tokens of `blocks`."""
        stored = [[part] if self.format is None else self.format.store(part) for part in parts]
        self._expect(stored)
        self._reserve(stored)
        places = self._places(blocks, start, len(parts[0]))
        for rooms, tensors in zip(self._rooms, stored, strict=True):
            for room, tensor in zip(rooms, tensors, strict=True):
                room.view(-1, *tensor.shape[1:])[places] = tensor

    def read(self, blocks: Sequence[int], stop: int, dtypes: Sequence[torch.dtype]) -> list[Tensor]:
        """The first `stop` tokens of `blocks`, each part [stop, ...] in its dtype."""
        places = self._places(blocks, 0, stop)
        found = [[room.view(-1, *room.shape[2:])[places] for room in rooms] for rooms in self._rooms]
        return [
            tensors[0].to(dtype) if self.format is None else self.format.load(tensors, dtype)
            for tensors, dtype in zip(found, dtypes, strict=True)
        ]

    def _places(self, blocks: Sequence[int], start: int, count: int) -> Tensor:
        device = self._rooms[0][0].device
        tokens = torch.arange(start, start + count, device=device)
        return (
            torch.tensor(blocks, dtype=torch.int64, device=device)[tokens // self.size] * self.size + tokens % self.size
        )

    def _expect(self, stored: Sequence[Sequence[Tensor]]) -> None:
        given = [tuple(tensors[0].shape[1:]) for tensors in stored]
        kept = [tuple(rooms[0].shape[2:]) for rooms in self._rooms] or given
        counts = {len(tensors[0]) for tensors in stored}
        if kept != given or len(counts) != 1:
            raise RuntimeFault(
                f"KV cache: keeps {kept} a token, was given {given} for {sorted(counts)} tokens; use one cache for "
                "each layer"
            )

    def _reserve(self, stored: Sequence[Sequence[Tensor]]) -> None:
        """Room for all blocks that were handed out."""
        have = len(self._rooms[0][0]) if self._rooms else 0
        if self._rooms and self.allocator.made <= have:
            return
        blocks = self.allocator.limit or max(self.allocator.made, 2 * have)
        try:
            made = [[x.new_empty((blocks, self.size, *x.shape[1:])) for x in tensors] for tensors in stored]
        except RuntimeError as error:  # what torch raises where memory can't be had, or couldn't be counted
            raise RuntimeFault(
                f"KV cache: no memory for {blocks} blocks of {self.size} tokens in a layer; give fewer or smaller ones "
                f"(--kv-blocks, --kv-block): {str(error).splitlines()[0]}"
            ) from error
        for old, new in zip(self._rooms, made, strict=False):
            for before, after in zip(old, new, strict=True):
                after[:have] = before
        self._rooms = made
