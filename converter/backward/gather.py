"""The way back: from manifests alone, where the bytes of a stored tensor lie in the shards, and reading them there."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from converter.streams.reading import Reader
from shard_plans.checkpoints.dtypes import DTYPE_BITS
from shard_plans.documents.manifest import Manifest, ManifestTensor, Piece, ShardManifest, read_shard_manifest
from shard_plans.errors import ManifestError
from shard_plans.placement.shards import Cut

Array = np.ndarray[Any, np.dtype[Any]]
Span = tuple[int, int]
"""Half-open range along one dimension."""
Index = slice | Array
BLOCK = 4 << 20
"""Bytes of a block of a stored tensor, and of what is read of a shard for it."""
NUMBER = re.compile(r"[0-9]+")


@dataclass(frozen=True, slots=True)
class Held:
    """One shard tensor that holds some of a stored tensor."""

    file: int
    """Number of the shard file."""
    tensor: ManifestTensor
    piece: Piece
    position: int | None
    """Number of the expert in the stack; None where the tensor isn't stacked."""
    row: int = 0
    """Where the piece begins, if its numbers are ordered anew: then `piece` counts places in the piece alone."""


_ByPattern = dict[str, list[tuple[int, ManifestTensor, Piece]]]


class Shards:
    """A finished output, opened to be read back: its manifests, and who holds what."""

    def __init__(self, out: Path, root: Manifest, manifests: Sequence[ShardManifest] | None = None) -> None:
        """`manifests` are those of root.files, where they have been read already."""
        self.out, self.root = out, root
        self.manifests = manifests or [read_shard_manifest(out, file.name, root) for file in root.files]
        self._stored: _ByPattern = {}
        self._converted: _ByPattern = {}
        for number, manifest in enumerate(self.manifests):
            for tensor in manifest.tensors:
                for piece in tensor.sources:
                    held = self._stored if piece.converted is None else self._converted
                    held.setdefault(piece.tensor, []).append((number, tensor, piece))

    @property
    def converted(self) -> bool:
        """Whether the precision of some of it was changed."""
        return bool(self._converted)

    def holders(self, name: str, converted: bool = False) -> list[Held]:
        """Every shard tensor that holds some of the stored tensor `name`, or of one that was made; all replicas."""
        by_pattern = self._converted if converted else self._stored
        found = [_held(file, t, piece, None) for file, t, piece in by_pattern.get(name, ()) if not piece.experts]
        for match in NUMBER.finditer(name):
            pattern = f"{name[: match.start()]}{{expert}}{name[match.end() :]}"
            for file, tensor, piece in by_pattern.get(pattern, ()):
                ids = piece.experts or ()
                found += [_held(file, tensor, piece, n) for n, held in enumerate(ids) if str(held) == match.group()]
        for file, tensor, piece in by_pattern.get(name, ()):
            for n, expert in enumerate(piece.experts or ()):  # one stored tensor stacks them: each is an entry of it
                held = _held(file, tensor, piece, n)
                cuts, at = (Cut(((expert, expert + 1),)), *held.piece.cuts), (0, *held.piece.at)
                arranged = piece.arranged.entry() if piece.arranged is not None else None
                found.append(replace(held, piece=replace(piece, cuts=cuts, at=at, arranged=arranged)))
        return [in_items(held) for held in found]

    def read(self, reader: Reader, held: Held, spans: Sequence[Span], buffer: Array) -> Array:
        """The rectangle `spans` (of the shard tensor, one expert where stacked), as items of whole bytes."""
        item, shape = items(held.tensor.dtype, held.tensor.shape if held.position is None else held.tensor.shape[1:])
        manifest, arranged = self.manifests[held.file], held.piece.arranged
        start = manifest.header_size + held.tensor.offset + (held.position or 0) * math.prod(shape) * item
        if arranged is not None:
            start += held.row * math.prod(shape[1:]) * item
            shape = arranged.ordered([cut.length for cut in held.piece.cuts])
            spans = arranged.ordered(spans)
        shape = (1,) * (len(spans) - len(shape)) + shape  # an entry of a stack
        lengths = [stop - first for first, stop in spans]
        split = len(shape) - 1  # the last dimension that isn't taken whole: behind it bytes follow one another
        while split > 0 and lengths[split] == shape[split]:
            split -= 1
        run = math.prod(lengths[split:]) * item
        needed = math.prod(lengths) * item
        room = buffer[:needed] if needed <= len(buffer) else np.empty(needed, np.uint8)
        done = 0
        for indexes in np.ndindex(*lengths[:split]):
            place = 0
            for axis, size in enumerate(shape):
                first = spans[axis][0] + (indexes[axis] if axis < split else 0)
                place = place * size + first
            reader.read(manifest.file, start + place * item, room.data[done : done + run])
            done += run
        found = room.view(f"u{item}").reshape(lengths)
        return found if arranged is None else arranged.seen(found)


def _held(file: int, tensor: ManifestTensor, piece: Piece, position: int | None) -> Held:
    """One that holds some; a piece whose numbers are ordered anew begins at 0."""
    if piece.arranged is None:
        return Held(file, tensor, piece, position)
    return Held(file, tensor, replace(piece, at=(0,) * len(piece.cuts)), position, piece.at[0])


def viewed(shape: tuple[int, ...], holders: Sequence[Held]) -> tuple[int, ...] | None:
    """The shape that all holders read the stored tensor as; None where they don't agree."""
    views = set()
    for held in holders:
        arranged = held.piece.arranged
        if arranged is None:
            views.add(shape)
        else:
            views.add((shape[0], *arranged.view[1:]) if held.piece.stacked else arranged.view)
    return views.pop() if len(views) == 1 else None if views else shape


def items(dtype: str, shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Bytes of an item and the shape in items; a scalar is one row, types below a byte are counted in bytes."""
    bits = DTYPE_BITS[dtype]
    if not shape:
        return bits // 8, (1,)
    if bits >= 8:
        return bits // 8, shape
    if shape[-1] * bits % 8:
        raise ManifestError(f"{dtype} {list(shape)} has rows that don't end with a byte; it can't be read back")
    return 1, (*shape[:-1], shape[-1] * bits // 8)


def in_items(held: Held) -> Held:
    """The same with cuts and position counted in items, as `items` counts shapes."""
    bits, piece = DTYPE_BITS[held.tensor.dtype], held.piece
    if not piece.cuts:
        return replace(held, piece=replace(piece, cuts=(Cut(((0, 1),)),), at=(0,)))
    if bits >= 8:
        return held
    runs = tuple((start * bits // 8, -(-stop * bits // 8)) for start, stop in piece.cuts[-1].runs)
    cuts = (*piece.cuts[:-1], Cut(runs, piece.cuts[-1].repeat))
    return replace(held, piece=replace(piece, cuts=cuts, at=(*piece.at[:-1], piece.at[-1] * bits // 8)))


def blocks(shape: Sequence[int], item: int, limit: int) -> Iterator[tuple[Span, ...]]:
    """Rectangles of at most `limit` bytes that make up a tensor, in row-major order; inside a row if it is longer."""
    if math.prod(shape) == 0:
        return
    row = math.prod(shape[1:]) * item
    if row <= limit or len(shape) == 1:
        step = max(1, limit // row)
        for start in range(0, shape[0], step):
            yield ((start, min(start + step, shape[0])), *((0, size) for size in shape[1:]))
        return
    for start in range(shape[0]):
        for rest in blocks(shape[1:], item, limit):
            yield ((start, start + 1), *rest)


def growth(holders: Sequence[Held]) -> int:
    """How many times larger than a stored block its image in a shard can be."""
    return max((math.prod(cut.repeat for cut in held.piece.cuts) for held in holders), default=1)


def overlap(held: Held, block: Sequence[Span]) -> tuple[list[Span], list[Index]] | None:
    """Which rectangle of the shard tensor holds elements of the stored block, and which elements they are there.

    None where it holds none. Indexes are relative to the block, one a dimension, to be combined as an outer product.
    """
    spans: list[Span] = []
    indexes: list[Index] = []
    for cut, at, (low, high) in zip(held.piece.cuts, held.piece.at, block, strict=True):
        taken = []
        first, passed = None, 0
        for start, stop in cut.runs:
            a, b = max(start, low * cut.repeat), min(stop, high * cut.repeat)
            if a < b:
                if first is None:
                    first = at + passed + a - start
                taken.append((a, b))
            passed += stop - start
        if first is None:
            return None
        spans.append((first, first + sum(b - a for a, b in taken)))
        if len(taken) == 1 and cut.repeat == 1:
            indexes.append(slice(taken[0][0] - low, taken[0][1] - low))
        else:
            indexes.append(np.concatenate([np.arange(a, b) for a, b in taken]) // cut.repeat - low)
    return spans, indexes


def pick(block: Array, indexes: Sequence[Index]) -> Array:
    """The outer product of the indexes, taken from the block."""
    for axis, index in enumerate(indexes):
        block = block[(slice(None),) * axis + (index,)] if isinstance(index, slice) else np.take(block, index, axis)
    return block


def put(block: Array, indexes: Sequence[Index], values: Array | bool) -> None:
    """Set the outer product of the indexes in the block."""
    if all(isinstance(index, slice) for index in indexes):
        block[tuple(indexes)] = values
        return
    whole = [
        np.arange(size)[index] if isinstance(index, slice) else index
        for index, size in zip(indexes, block.shape, strict=True)
    ]
    block[np.ix_(*whole)] = values


def whole(indexes: Sequence[Index], shape: Sequence[int]) -> bool:
    """Whether the indexes are plainly the whole block."""
    return all(isinstance(i, slice) and (i.start, i.stop) == (0, n) for i, n in zip(indexes, shape, strict=True))
