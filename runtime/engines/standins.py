"""Stored tensors as a rank has them: of the stored shape, with what its shards hold of them in its place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from converter.sources.layouts import Region, in_items
from converter.sources.sharded import Sharded, ShardReader
from runtime.engines.watch import Account, Watch, open_account
from runtime.loading.reading import as_stored

ROOM = 8 << 20
"""Bytes read at a time."""

Array = np.ndarray[Any, np.dtype[np.uint8]]


class StandIns:
    """The stored tensors of which some shard files hold a part, one after the other, each byte hashed as it is read.

    Memory that isn't written isn't there: a stand-in takes about what the shards hold of its tensor.
    """

    def __init__(self, source: Sharded, layers: int) -> None:
        """`layers`: those that the engine's model has; what belongs to later ones is left out."""
        self.source, self.layers = source, layers
        self.bytes_read = 0
        self.done = False
        """Everything was lent, and all digests were right."""
        self._accounts: list[Account] = []

    def lend(self, watch: Watch) -> Iterator[tuple[str, Tensor]]:
        """Name and stand-in of each; `watch` sees to it that nothing else than what is held is read."""
        checkpoint = self.source.checkpoint
        self.source.seals()
        with self.source.reader(ROOM) as reader:
            for number, name in enumerate(checkpoint.names):
                if not self._wanted(number):
                    continue
                memory = np.zeros(int(checkpoint.sizes[number]), np.uint8)
                regions, held = self._fill(reader, number, memory)
                tensor = as_stored(torch.from_numpy(memory), checkpoint.dtypes[number], checkpoint.shapes[number])
                account = open_account(name, tensor, regions)
                watch.lend(account, tensor, memory)
                if held:
                    self._accounts.append(account)
                del memory
                yield name, tensor
                del tensor
            reader.prove()
            self.bytes_read = reader.bytes_read
        self.source.unchanged()
        self.done = True

    def unused(self) -> list[str]:
        """Names of the tensors of which nothing was read."""
        return [account.name for account in self._accounts if not account.touched]

    def _wanted(self, number: int) -> bool:
        """Whether the shards hold some of it, or say what it is."""
        holdings = self.source.holdings
        parts = [part for entry in range(holdings.entries(number)) for part in holdings.tiles(number, entry)]
        if parts:
            return _layer(parts[0][0].name) < self.layers
        return bool(holdings.constants(number))

    def _fill(self, reader: ShardReader, number: int, memory: Array) -> tuple[list[Region], bool]:
        """Put what is held in its place; which regions that is, and whether a shard holds any of them."""
        holdings, checkpoint = self.source.holdings, self.source.checkpoint
        item, shape = in_items(checkpoint.dtypes[number], checkpoint.shapes[number])
        whole = memory.view(f"u{item}").reshape(shape)
        if holdings.entries(number) == 1:
            return list(reader.put(number, 0, whole)), bool(holdings.tiles(number))
        regions = []
        for entry in range(len(whole)):
            regions += [(((entry, entry + 1),), *region) for region in reader.put(number, entry, whole[entry])]
        return regions, True


def _layer(name: str) -> int:
    """The layer of a shard tensor; -1 outside the layers."""
    words = name.split(".", 2)
    return int(words[1]) if words[0] == "layers" else -1
