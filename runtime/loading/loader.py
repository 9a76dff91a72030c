"""Loads layers on background threads, in the order of the forward pass, while earlier layers are already computed.

One loader serves every rank of its process: a tensor that several ranks share is read once. At most a few layers ahead
of the slowest rank are loaded; a layer that every rank has released is dropped, unless the budget lets it stay for the
next pass.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from runtime.blocks.weights import LayerWeights, Stored
from runtime.loading.sections import FIRST, LAST, VISION, section_of, section_words
from runtime.loading.shelf import Shard, open_shard
from shard_plans.documents.manifest import Manifest
from shard_plans.errors import ManifestError, ReshardError, RuntimeFault

Item = tuple[str, str]
"""A tensor: file and name."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load."""

    device: torch.device
    check: bool = True
    """Compare digests."""
    look_ahead: int = 2
    """Sections loaded beyond the one that the slowest rank is in."""
    budget: int = 0
    """Bytes of sections that stay in memory from one pass to the next; the first ones in order stay."""
    threads: int = 2
    tower: bool = False
    """Load the vision tower, and nothing else; otherwise everything but the tower."""


class Loader:
    """Weights of some ranks of an output folder, a section at a time. Thread-safe; close it, or use `with`."""

    def __init__(self, out: Path, root: Manifest, ranks: Sequence[int], layers: int, options: LoadOptions) -> None:
        """Open and check the files of `ranks` and start to load; layers from number `layers` on are left out.

        Raises ManifestError as open_shard does.
        """
        self.options, self.ranks = options, tuple(ranks)
        files = {entry.at.rank: entry.files for entry in root.ranks}
        missing = [rank for rank in ranks if rank not in files]
        if missing:
            raise ManifestError(f"{out}: the manifest lists no rank {missing[0]}; it lists {len(files)}")
        self._shards: dict[str, Shard] = {}
        self._threads: list[threading.Thread] = []
        self._state = threading.Condition()
        self._closed = False
        self._error: BaseException | None = None
        self.bytes_read = self.resident = self.peak = 0
        """Bytes read so far; bytes of weights in memory now, and at most."""
        self.seconds_waited = 0.0
        """What ranks spent waiting for weights, summed."""
        try:
            for name in sorted({name for rank in ranks for name in files[rank]}):
                self._shards[name] = open_shard(out, root, name, options.check)
            self._arrange({rank: files[rank] for rank in ranks}, layers)
            for number in range(max(1, options.threads)):
                self._threads.append(threading.Thread(target=self._work, name=f"loader-{number}", daemon=True))
                self._threads[-1].start()
            with self._state:
                self._schedule(0)
        except BaseException:
            self.close()
            raise

    def _arrange(self, files: Mapping[int, Sequence[str]], layers: int) -> None:
        """Which tensors make each rank's sections, the order of the sections, and which stay in memory."""
        self._parts: dict[tuple[int, int], dict[str, Item]] = {}
        for rank, names in files.items():
            for file in names:
                for name in self._shards[file].tensors:
                    section, short = section_of(name)
                    if name.startswith(VISION) == self.options.tower and (section < layers or section == LAST):
                        self._parts.setdefault((rank, section), {})[short] = (file, name)
            last, first = self._parts.get((rank, LAST)), self._parts.get((rank, FIRST), {})
            if last and "head" not in last and "embed" in first:
                last["embed"] = first["embed"]
        self.sections = tuple(sorted({section for _, section in self._parts}))
        """Sections that these ranks hold, in execution order."""
        self._place = {section: number for number, section in enumerate(self.sections)}
        self._users = {s: [rank for rank in files if (rank, s) in self._parts] for s in self.sections}
        self._items: dict[int, list[Item]] = {}
        homes: dict[Item, int] = {}
        self._kept: set[Item] = set()
        for section in self.sections:
            wanted = {i: None for rank in self._users[section] for i in self._parts[rank, section].values()}
            self._items[section] = sorted(wanted, key=lambda i: (i[0], self._shards[i[0]].tensors[i[1]].offset))
            for item in self._items[section]:
                if homes.setdefault(item, section) != section:
                    self._kept.add(item)  # a tied embedding is needed at both ends of the pass
        room, self.all_kept = self.options.budget, True
        for section in self.sections:
            room -= sum(self._size(item) for item in self._items[section] if homes[item] == section)
            if room < 0:
                self.all_kept = False
                break
            self._kept.update(self._items[section])
        self._ahead = min(self.options.look_ahead, len(self.sections) - 1)
        self._present: dict[Item, Tensor] = {}
        self._flying: dict[Item, list[int]] = {}
        self._lacking: dict[int, int] = {}
        self._released = {(rank, s): 0 for s in self.sections for rank in self._users[s]}
        self._left: dict[int, int] = {}
        self._queue: deque[Item] = deque()
        self._floor = 0
        self._scheduled = 0
        self._asked = len(self.sections) - 1

    def _size(self, item: Item) -> int:
        return self._shards[item[0]].tensors[item[1]].nbytes

    def holds(self, rank: int, section: int) -> bool:
        """Whether `rank` has anything of `section`."""
        return (rank, section) in self._parts

    def get(self, rank: int, section: int) -> LayerWeights:
        """The weights of `section` (FIRST, a layer number, LAST) that `rank` holds; waits until they are loaded.

        Call `release` when they are no longer needed; after that `get` means the next pass. Raises the error of the
        thread that failed to load them.
        """
        parts = self._parts.get((rank, section))
        if parts is None:
            raise RuntimeFault(f"rank {rank} holds nothing of {section_words(section)}; another stage does")
        with self._state:
            turn = self._released[rank, section] * len(self.sections) + self._place[section]
            if turn > self._asked:
                self._asked = max(turn, (turn // len(self.sections) + 1) * len(self.sections) - 1)
            self._schedule(turn)
            began = time.monotonic()
            while self._lacking.get(turn, 1) or self._closed:
                if self._error is not None:
                    raise _again(self._error)
                if self._closed:
                    raise RuntimeFault("the loader was closed while a rank waited for weights")
                self._state.wait()
            self.seconds_waited += time.monotonic() - began
            return self._stored({name: (item, self._present[item]) for name, item in parts.items()})

    def release(self, rank: int, section: int) -> None:
        """Say that `rank` is done with what it got of `section`."""
        with self._state:
            turn = self._released[rank, section] * len(self.sections) + self._place[section]
            self._released[rank, section] += 1
            self._left[turn] -= 1
            if self._left[turn] == 0:
                del self._left[turn], self._lacking[turn]
                if turn + len(self.sections) not in self._left:  # else a rank is already in the next pass
                    for item in set(self._items[section]) - self._kept:
                        del self._present[item]
                        self.resident -= self._size(item)
            while self._floor < self._scheduled and self._floor not in self._left:
                self._floor += 1
            self._schedule(0)

    def _stored(self, found: Mapping[str, tuple[Item, Tensor]]) -> LayerWeights:
        """Values joined with their scales."""
        weights: dict[str, Stored | tuple[Stored, ...]] = {}
        for name, (item, values) in found.items():
            tensor = self._shards[item[0]].tensors[item[1]]
            if tensor.part == "values":
                scale, whole = found.get(f"{name}.scale"), found.get(f"{name}.global_scale")
                weights[name] = Stored(
                    values, None if scale is None else scale[1], tensor.format, tensor.block,
                    None if whole is None else whole[1],
                )  # fmt: skip
        return weights

    def _schedule(self, wanted: int) -> None:
        """Queue sections up to the look-ahead, and at least up to turn `wanted`; the lock is held."""
        limit = max(min(self._floor + self._ahead, self._asked), wanted)
        while self.sections and self._scheduled <= limit:
            turn, section = self._scheduled, self.sections[self._scheduled % len(self.sections)]
            self._scheduled += 1
            self._left[turn] = len(self._users[section])
            self._lacking[turn] = 0
            for item in self._items[section]:
                if item in self._present:
                    continue
                self._lacking[turn] += 1
                if item in self._flying:
                    self._flying[item].append(turn)
                else:
                    self._flying[item] = [turn]
                    self._queue.append(item)
        self._state.notify_all()

    def _work(self) -> None:
        """A loader thread: read, check, copy to the device, hand over."""
        try:
            while True:
                with self._state:
                    while not self._queue and not self._closed:
                        self._state.wait()
                    if self._closed:
                        return
                    file, name = item = self._queue.popleft()
                tensor = self._shards[file].read(name, self.options.check).to(self.options.device)
                with self._state:
                    self.bytes_read += self._size(item)
                    self.resident += self._size(item)
                    self.peak = max(self.peak, self.resident)
                    self._present[item] = tensor
                    for turn in self._flying.pop(item):
                        self._lacking[turn] -= 1
                    self._state.notify_all()
        except BaseException as fault:
            with self._state:
                self._error = self._error or fault
                self._closed = True
                self._state.notify_all()

    def close(self) -> None:
        """Stop the threads, drop all weights, close the files."""
        with self._state:
            self._closed = True
            self._state.notify_all()
        for thread in self._threads:
            thread.join()
        for shard in self._shards.values():
            shard.close()
        self._shards, self._present = {}, {}

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _again(error: BaseException) -> BaseException:
    """The same fault, to be raised in another thread."""
    if isinstance(error, ReshardError):
        return type(error)(*error.args).with_traceback(error.__traceback__)
    return RuntimeFault(f"a loader thread failed: {type(error).__name__}: {error}")
