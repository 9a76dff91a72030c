"""Loads layers on background threads, in the order of the forward pass, while earlier layers are already computed.

One loader serves every rank of its process: a tensor that several ranks share is read once. At most a few sections are
in memory; one that every rank has released gives its memory to a later one, unless it stays for the next pass. Memory
is used again only when no tensor looks into it (slabs.py), so what a rank was given never changes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from torch import Tensor

from runtime.blocks.weights import LayerWeights
from runtime.loading.batches import Batch, Batches, LoadOptions
from runtime.loading.held import Held, Item, look
from runtime.loading.sections import section_words
from runtime.loading.shelf import check_shard
from shard_plans.documents.manifest import Manifest
from shard_plans.errors import ManifestError, ReshardError, RuntimeFault

__all__ = ["LoadOptions", "Loader"]

PATIENCE = 60.0
"""Seconds that a rank waits while released layers keep their memory, because something still looks into it."""


class Loader:
    """Weights of some ranks of an output folder, a section at a time. Thread-safe; close it, or use `with`."""

    def __init__(
        self, out: Path, root: Manifest, ranks: Sequence[int], layers: int, options: LoadOptions,
        admit: Callable[[int, int], None] = lambda reserved, matrix: None,
    ) -> None:  # fmt: skip
        """Look at the files of `ranks` and start to load; layers from number `layers` on are left out.

        `admit` is told the bytes that weights will take and the numbers of the largest matrix, before any is read, and
        may refuse by raising. Raises ManifestError as check_shard does.
        """
        self.options, self.ranks = options, tuple(ranks)
        files = {entry.at.rank: entry.files for entry in root.ranks}
        missing = [rank for rank in ranks if rank not in files]
        if missing:
            raise ManifestError(f"{out}: the manifest lists no rank {missing[0]}; it lists {len(files)}")
        taken = range(layers) if options.only is None else options.only
        wanted = sorted({name for rank in ranks for name in files[rank]})
        shards = {name: check_shard(out, root, name, options.check) for name in wanted}
        self._held = Held(shards, {rank: files[rank] for rank in ranks}, taken, options.tower)
        self.sections = self._held.sections
        """Sections that these ranks hold, in execution order."""
        self._place = {section: number for number, section in enumerate(self.sections)}
        self._kept, self.all_kept = self._held.kept(options.budget)
        self._ahead = min(max(options.resident, 1), len(self.sections)) - 1
        self.reserved = self._most(self._held.memory())
        """Bytes of memory that weights take at most."""
        admit(self.reserved, self._held.largest_matrix())
        self.resident = self.peak = 0
        """Bytes of weights in memory now or on their way there, and at most."""
        self.seconds_waited = 0.0
        """What ranks spent waiting for weights, summed."""
        self._present: dict[Item, Tensor] = {}
        self._flying: dict[Item, Batch] = {}
        self._lacking: dict[int, int] = {}
        """Turn -> batches that haven't arrived. A turn is a section in one of the passes."""
        self._released = dict.fromkeys(self._held.parts, 0)
        self._left: dict[int, int] = {}
        """Turn -> ranks that haven't released it."""
        self._floor = self._scheduled = 0
        self._asked = len(self.sections) - 1
        self._state = threading.Condition()
        sizes = {name: manifest.size for name, manifest in shards.items()}
        self._batches = Batches(out, sizes, options, self.reserved, self._state, self._arrived)
        with self._state:
            self._schedule(0)

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors read so far."""
        return self._batches.bytes_read

    @property
    def seconds_loading(self) -> float:
        """How long something was being loaded."""
        return self._batches.seconds

    @property
    def rate(self) -> int:
        """Bytes a second while something was being loaded."""
        return round(self.bytes_read / self.seconds_loading) if self.seconds_loading else 0

    def _most(self, sizes: Sequence[int]) -> int:
        """Bytes of what stays, and of as many other sections in a row as may be in memory, across the end of a pass."""
        stays = [not self._kept.isdisjoint(self._held.items[section]) for section in self.sections]
        loaded = [0 if stay else size for size, stay in zip(sizes, stays, strict=True)]
        windows = [sum((loaded + loaded)[at : at + self._ahead + 1]) for at in range(len(loaded))]
        return sum(sizes) - sum(loaded) + max(windows, default=0)

    def holds(self, rank: int, section: int) -> bool:
        """Whether `rank` has anything of `section`."""
        return (rank, section) in self._held.parts

    def get(self, rank: int, section: int) -> LayerWeights:
        """The weights of `section` (FIRST, a layer number, LAST) that `rank` holds; waits until they are loaded.

        Call `release` when they are no longer needed, and keep nothing of them; after that `get` means the next pass.
        Raises the error of the thread that failed to load them.
        """
        if not self.holds(rank, section):
            raise RuntimeFault(f"rank {rank} holds nothing of {section_words(section)}; another stage does")
        with self._state:
            turn = self._released[rank, section] * len(self.sections) + self._place[section]
            if turn > self._asked:
                self._asked = max(turn, (turn // len(self.sections) + 1) * len(self.sections) - 1)
            self._schedule(turn)
            began = time.monotonic()
            while self._lacking.get(turn, 1) or self._batches.closed:
                if self._batches.error is not None:
                    raise _again(self._batches.error)
                if self._batches.closed:
                    raise RuntimeFault("the loader was closed while a rank waited for weights")
                if not self._state.wait(PATIENCE) and (stuck := self._batches.stuck) is not None:
                    raise RuntimeFault(
                        f"rank {rank} waits for {section_words(section)}, which needs {stuck.arranged.nbytes} bytes, "
                        f"but {self._batches.used} of the {self.reserved} that are reserved are still in use: "
                        "something keeps weights of a layer that was released"
                    )
            self.seconds_waited += time.monotonic() - began
            return self._held.stored(rank, section, self._present)

    def release(self, rank: int, section: int) -> None:
        """Say that `rank` is done with what it got of `section`."""
        with self._state:
            turn = self._released[rank, section] * len(self.sections) + self._place[section]
            self._released[rank, section] += 1
            self._left[turn] -= 1
            if self._left[turn] == 0:
                del self._left[turn], self._lacking[turn]
                if turn + len(self.sections) not in self._left:  # else a rank is already in the next pass
                    for item in set(self._held.items[section]) - self._kept:
                        del self._present[item]
                        self.resident -= self._held.tensor(item).nbytes
            while self._floor < self._scheduled and self._floor not in self._left:
                self._floor += 1
            self._schedule(0)

    def _schedule(self, wanted: int) -> None:
        """Load sections up to those that may be in memory, and at least up to turn `wanted`; the lock is held."""
        allowed = min(self._floor + self._ahead, self._asked)
        while self.sections and self._scheduled <= max(allowed, wanted):
            turn, section = self._scheduled, self.sections[self._scheduled % len(self.sections)]
            self._scheduled += 1
            self._left[turn] = len(self._held.users[section])
            coming = {id(b): b for item in self._held.items[section] if (b := self._flying.get(item)) is not None}
            for batch in coming.values():
                batch.turns.append(turn)
                batch.beyond |= turn > allowed
            missing = [i for i in self._held.items[section] if i not in self._present and i not in self._flying]
            self._lacking[turn] = len(coming) + bool(missing)
            if missing:
                batch = Batch(self._held.arrange(missing), [turn], turn > allowed)
                self._flying.update(dict.fromkeys(missing, batch))
                self.resident += sum(self._held.tensor(item).nbytes for item in missing)
                self.peak = max(self.peak, self.resident)
                self._batches.add(batch)

    def _arrived(self, batch: Batch, memory: Tensor) -> None:
        """The batch's tensors are there; the lock is held."""
        for file, tensor, place in batch.arranged.places:
            self._present[file, tensor.name] = look(memory, place, tensor)
            del self._flying[file, tensor.name]
        for turn in batch.turns:
            self._lacking[turn] -= 1

    def close(self) -> None:
        """Stop the threads, drop all weights, close the files."""
        self._batches.close()
        self._present, self._flying = {}, {}

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
