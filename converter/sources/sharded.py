"""The shards of an output as a source: they stand for the files of the checkpoint that the output was made from."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from converter.backward.regions import Declared
from converter.faults import SourceChanged
from converter.sources.held import Tile
from converter.sources.holdings import Holdings
from converter.sources.layouts import Region, Span, clip, in_items, read_as, rectangles
from converter.sources.proof import ProvingReader
from converter.sources.rearranged import rearrange
from converter.sources.source import Need, Source, Stretch
from converter.streams.buffers import PAGE, aligned
from converter.streams.reading import Stamp, stamp_of
from shard_plans.checkpoints.checkpoint import Checkpoint, SourceFile, inside
from shard_plans.checkpoints.headers import brief
from shard_plans.documents.manifest import Origin, read_manifest
from shard_plans.documents.stored import HEADERS, SOURCE
from shard_plans.errors import ManifestError
from shard_plans.families.binding import Binding
from shard_plans.placement.arrangement import narrow
from shard_plans.placement.shards import Placement

Array = np.ndarray[Any, np.dtype[Any]]


class Sharded(Source):
    """A finished output that stands for its checkpoint. Every byte of it is compared with its digest."""

    buffers, sequential = 3, True

    def __init__(self, checkpoint: Checkpoint, files: Collection[str] | None = None) -> None:
        """Read the manifests of the output in the checkpoint's folder, of these shard files alone (None: of all).

        Raises ManifestError.
        """
        super().__init__(checkpoint)
        self.out: Path = checkpoint.folder
        self.root = read_manifest(self.out)
        if files is not None:
            self.root = replace(self.root, files=tuple(file for file in self.root.files if file.name in files))
        self.holdings = Holdings(self.out, self.root, checkpoint)
        self.proven = bytearray(self.holdings.chunks)
        self.via = (*self.root.via, Origin(self.root.plan, self.root.digest))
        self._sizes = {file.name: file.size for file in self.root.files}
        self._stamps: dict[str, Stamp] = {}

    def reader(self, room: int) -> ShardReader:
        """A reader that puts stored tensors together."""
        room = max(room, PAGE)
        return ShardReader(
            self.checkpoint, self.holdings, ProvingReader(self.out, self._sizes, self._stamps, room, self.proven)
        )

    def seals(self) -> Mapping[str, str]:
        """Size and digest of the manifest of each shard file: where and when it was written is of no matter."""
        self._stamps = self._now()
        return {file.name: f"{file.size} bytes, manifest {file.xxh3}" for file in self.root.files}

    def unchanged(self) -> None:
        """Compare size, time of change and inode of the shard files."""
        for name, now in self._now().items():
            before = self._stamps.get(name, now)
            if now != before:
                raise SourceChanged(
                    f"{self.out / name} was changed while it was read: it had {before}; now it has {now}; run again"
                )

    def prepare(self, binding: Binding, placement: Placement) -> None:
        """Look whether everything that the placement draws on is held; what else is so was checked for the output."""
        self.require(need for file in placement.files for t in file.tensors for s in t.sources for need in s.drawn)

    def require(self, needs: Iterable[tuple[str, Need]]) -> None:
        """Raise ManifestError for the first of these that the shards don't hold."""
        self.holdings.require(needs)

    def carried(self, name: str) -> Stretch:
        """The file as it was carried along."""
        stated = {file.name: file.xxh3 for file in self.root.carried}
        return Stretch(inside(self.out / SOURCE, name), digest=stated[name])

    def header(self, file: SourceFile) -> Stretch:
        """The header as it was kept."""
        return Stretch(inside(self.out / HEADERS, f"{file.name}.json"), 0, file.header_size, file.header_digest)

    def _now(self) -> dict[str, Stamp]:
        found = {}
        for file in self.root.files:
            try:
                found[file.name] = stamp_of(os.stat(self.out / file.name))
            except OSError as error:
                raise ManifestError(f"{self.out / file.name} can't be read: {error.strerror}") from error
        return found


class ShardReader(AbstractContextManager["ShardReader"]):
    """Reads stored tensors out of shards, for one thread: whole parts as they lie there, others put together."""

    def __init__(self, checkpoint: Checkpoint, holdings: Holdings, shards: ProvingReader) -> None:
        self.checkpoint, self.holdings, self.shards = checkpoint, holdings, shards
        self._room = aligned(0)
        self._numbers = {file.name: number for number, file in enumerate(checkpoint.files)}
        files = checkpoint.file_numbers[: len(checkpoint)]
        self._bounds = np.searchsorted(files, np.arange(len(checkpoint.files) + 1))
        self._last: tuple[tuple[int, int], list[Tile], list[Declared] | None] = (-1, 0), [], None
        """The entry of a stored tensor that was read last, its parts, and what is declared where they aren't all."""

    @property
    def bytes_read(self) -> int:
        """Of shard files."""
        return self.shards.bytes_read

    @property
    def unproven(self) -> int:
        """Bytes left to read until everything fetched is known to be undamaged."""
        return self.shards.unproven

    def prove(self) -> None:
        """Read them. Raises CheckFailed."""
        self.shards.prove()

    def expect(self, name: str, spans: Sequence[tuple[int, int]]) -> None:
        """Nothing is read ahead: a part of a stored tensor is a large piece already."""

    def passed(self, count: int) -> None:
        """Deal the memory anew."""
        self.shards.rest()

    def forget(self) -> None:
        """The same."""
        self.shards.rest()

    def read(self, name: str, offset: int, view: memoryview) -> memoryview:
        """Fill `view`; see StoredReader."""
        for start in range(0, len(view), self.shards.room):
            length = min(self.shards.room, len(view) - start)
            view[start : start + length] = self.fetch(name, offset + start, length)
        return view

    def fetch(self, name: str, offset: int, length: int) -> memoryview:
        """Bytes of the checkpoint's file `name`, all of them of tensors; see StoredReader. What isn't there is zero."""
        gathered = bytearray()
        while True:
            number = self._number(name, offset + len(gathered))
            first = offset + len(gathered) - int(self.checkpoint.starts[number])
            size = int(self.checkpoint.sizes[number]) // self.holdings.entries(number)
            step = min(length - len(gathered), size - first % size)
            view = self._fetch(number, first // size, first % size, step)
            if step == length:
                return view
            gathered += view  # over the end of a tensor, or of an entry of it
            if len(gathered) == length:
                return memoryview(gathered)

    def some(self, name: str, offset: int, length: int, unit: int = 1) -> memoryview:
        """All of them are at hand; see StoredReader."""
        return self.fetch(name, offset, length)

    def put(self, number: int, entry: int, into: Array) -> tuple[Region, ...]:
        """Put what the shards hold of an entry of a stored tensor in its place in `into`, and say what that is.

        `into` has the entry's shape in items (`in_items`), as unsigned numbers; where nothing is held it is left alone.
        """
        tiles, whole = self.holdings.tiles(number, entry), [(0, size) for size in into.shape]
        for tile in tiles:
            self._fill(into, tile, tile[2], whole, 0)
        regions = [layout.region for _, layout, _ in tiles]
        for constant in self.holdings.constants(number) if self.holdings.entries(number) == 1 else ():
            content = constant.within(whole)
            if content is not None:
                into[content[0]] = content[1]
                regions.append(tuple((span,) for span in constant.region))
        return tuple(regions)

    def _number(self, name: str, offset: int) -> int:
        """The stored tensor in which the byte of that file lies."""
        file = self._numbers[name]
        low, high = int(self._bounds[file]), int(self._bounds[file + 1])
        number = low + int(np.searchsorted(self.checkpoint.starts[low:high], offset, "right")) - 1
        if number < low or offset >= int(self.checkpoint.starts[number]) + int(self.checkpoint.sizes[number]):
            raise ManifestError(f"byte {offset} of {brief(name)} belongs to no tensor of {self.checkpoint.folder}")
        return number

    def _fetch(self, number: int, entry: int, start: int, length: int) -> memoryview:
        """Bytes of one entry of a stored tensor."""
        if (number, entry) != self._last[0]:
            tiles = self.holdings.tiles(number, entry)
            whole = self.holdings.unheld(number, tuple(layout for _, layout, _ in tiles)) is None
            self._last = (number, entry), tiles, None if whole else self.holdings.constants(number)
        _, tiles, constants = self._last
        for tensor, layout, base in tiles:
            if layout.straight and layout.units[0]:
                begin = start - layout.cuts[0].runs[0][0] * layout.units[0]
                if 0 <= begin <= begin + length <= layout.units[0] * layout.shape[0]:
                    return self.shards.take(tensor, base + begin, length)
        if len(self._room) < length:
            self._room = aligned(max(length, self.shards.room))
        room = self._room[:length]
        if constants is not None:
            room[:] = 0
        dtype, stored = self.checkpoint.dtypes[number], self.holdings.shape(number)
        item, shape = in_items(dtype, stored)[0], read_as(dtype, stored, (layout for _, layout, _ in tiles))
        done = 0
        for spans in rectangles(shape, start // item, (start + length) // item):
            lengths = [stop - first for first, stop in spans]
            size = math.prod(lengths) * item
            part = room[done : done + size].view(f"u{item}").reshape(lengths)
            for constant in constants or ():
                content = constant.within(spans)
                if content is not None:
                    part[content[0]] = content[1]
            for tile in tiles:
                if tile[1].arranged is not None:
                    rearrange(self.shards, part, tile, tile[1].arranged, spans)
                else:
                    self._fill(part, tile, tile[2], spans, 0)
            done += size
        return room.data

    def _fill(self, part: Array, tile: Tile, base: int, spans: Sequence[Span], axis: int) -> None:
        """Put what a tile holds of a rectangle in its place: `part` are the dimensions of it from `axis` on.

        `base` is where the tile's elements for the indexes of the dimensions before begin, in bytes of the tensor.
        """
        tensor, layout, _ = tile
        unit = layout.units[axis]
        low, high = spans[axis]
        rest = range(axis + 1, len(spans))
        piece = self.shards.piece
        together = unit <= piece and all(spans[a] == (0, layout.stored[a]) for a in rest)
        for match in clip(layout.matches[axis], low, high):
            many = max(1, piece // max(1, unit * match.step)) if together else 1
            for first in range(match.start, match.stop, many):
                count = min(many, match.stop - first)
                begin = base + (match.place + (first - match.start) * match.step) * unit
                if not together:
                    self._fill(part[first - low], tile, begin, spans, axis + 1)
                    continue
                long = (count - 1) * match.step + 1
                view = self.shards.take(tensor, begin, long * unit)
                found = np.frombuffer(view, f"<u{layout.held}").reshape(long, *layout.shape[axis + 1 :])[:: match.step]
                found = narrow(found, layout.item)
                target = part[first - low : first - low + count]
                for there, here in layout.inner[axis]:
                    np.copyto(target[there], found[here])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shards.__exit__(kind, error, trace)
