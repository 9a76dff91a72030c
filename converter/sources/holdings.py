"""What the shards of an output hold of each stored tensor: its manifests turned round, one replica of everything."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from converter.backward.regions import Declared, Regions, declared
from converter.sources.held import PLAIN, STACK, Group, HeldTensor, Part, Places, Tile
from converter.sources.layouts import Layout, Region, make_layout, read_as, stored_region, uncovered
from converter.sources.source import Need
from shard_plans.checkpoints.checkpoint import Checkpoint
from shard_plans.checkpoints.dtypes import DTYPE_BITS
from shard_plans.documents.digests import CHUNK
from shard_plans.documents.manifest import Manifest, ManifestTensor, Piece, ShardManifest, read_shard_manifest
from shard_plans.errors import ManifestError
from shard_plans.placement.arrangement import Arrangement, rows_filled
from shard_plans.placement.experts import format_ids
from shard_plans.placement.shards import Cut

Numbers = np.ndarray[Any, np.dtype[np.int32]]
Wanted = tuple[tuple[Cut, ...], Arrangement | None]
"""Cuts of a stored tensor, or of the shape that they read it as."""


class Holdings:
    """The shards of an output, by the stored tensors that they hold."""

    def __init__(self, out: Path, root: Manifest, checkpoint: Checkpoint) -> None:
        """Read every manifest of the output; what replicas hold again is left out. Raises ManifestError."""
        self.out, self.root, self.checkpoint = out, root, checkpoint
        self.chunks = 0
        """Chunks of all shard tensors."""
        self._groups: list[list[Group]] = []
        self._numbers: dict[str, int] = {}
        """Name or pattern -> its number in `_groups`."""
        self._of: Numbers = np.full(len(checkpoint), -1, np.int32)
        self._expert: Numbers = np.full(len(checkpoint), -1, np.int32)
        """Which expert the stored tensor is; -1: none; -2: it stacks all of them."""
        self._places: dict[tuple[int, ...], Places] = {}
        self._layouts: dict[Any, Layout] = {}
        self._known: dict[Any, tuple[int, ...] | None] = {}
        self._constants = Regions(root.constants)
        for file in root.files:
            manifest = read_shard_manifest(out, file.name, root)
            for tensor in manifest.tensors:
                if any(piece.converted for piece in tensor.sources):
                    raise ManifestError(
                        f"{out} holds {tensor.name} in another precision than its checkpoint (--weights), so it can't "
                        f"stand for it; start from the checkpoint, or put these weights together with reshard restore "
                        f"--converted and convert what that makes"
                    )
                try:
                    self._add(manifest, tensor)
                except ManifestError as error:
                    raise ManifestError(f"{out / file.manifest}: {tensor.name}: {error}") from None

    def entries(self, number: int) -> int:
        """In how many pieces the stored tensor of that number is held: one an expert where it stacks them."""
        return self.checkpoint.shapes[number][0] if self._expert[number] == STACK else 1

    def shape(self, number: int) -> tuple[int, ...]:
        """Shape of such a piece."""
        shape = self.checkpoint.shapes[number]
        return shape[1:] if self._expert[number] == STACK else shape

    def tiles(self, number: int, entry: int = 0) -> list[Tile]:
        """Parts that together hold what there is of an entry of a stored tensor; none twice."""
        pattern, expert = int(self._of[number]), int(self._expert[number])
        found: dict[Layout, Tile] = {}
        for group in self._groups[pattern] if pattern >= 0 else ():
            place = 0 if group.places is None else group.places.get(entry if expert == STACK else expert)
            if place is None:
                continue
            for layout, part in group.parts.items():
                if layout not in found:
                    found[layout] = part.tensor, layout, part.base + place * part.each
            if self.missing(number, found) is None:
                break
        return list(found.values())

    def missing(self, number: int, held: Iterable[Layout], wanted: Wanted | None = None) -> tuple[int, ...] | None:
        """The first index of an entry of a stored tensor, or of cuts of it, that is neither held nor declared."""
        layouts = tuple(held)
        unheld = self.unheld(number, layouts, wanted)
        constants = self.constants(number) if unheld is not None else ()
        if not constants:
            return unheld
        declared = [tuple((span,) for span in constant.region) for constant in constants]
        regions = [*(layout.region for layout in layouts), *declared]
        return uncovered(self._wanted(number, wanted, layouts), regions)

    def unheld(self, number: int, layouts: tuple[Layout, ...], wanted: Wanted | None = None) -> tuple[int, ...] | None:
        """The first index of an entry of a stored tensor, or of cuts of it, that none of the parts holds."""
        key = layouts, self.shape(number), self.checkpoint.dtypes[number], wanted
        if key not in self._known:
            regions = [layout.region for layout in layouts]
            self._known[key] = uncovered(self._wanted(number, wanted, layouts), regions)
        return self._known[key]

    def _wanted(self, number: int, wanted: Wanted | None, layouts: Iterable[Layout]) -> Region:
        """The region that is wanted, in the shape that the parts read the tensor as: all of it, if that is another."""
        dtype, shape = self.checkpoint.dtypes[number], self.shape(number)
        read = read_as(dtype, shape, layouts)
        if wanted is not None:
            layout = make_layout(dtype, shape, *wanted)
            if layout.stored == read:
                return layout.region
        return tuple(((0, size),) for size in read)

    def constants(self, number: int) -> list[Declared]:
        """What is declared of a stored tensor, because it lies in no shard."""
        dtype, shape = self.checkpoint.dtypes[number], self.checkpoint.shapes[number]
        found = [declared(constant, dtype, shape) for constant in self._constants.of(self.checkpoint.names[number])]
        return [constant for constant in found if constant is not None]

    def require(self, needs: Iterable[tuple[str, Need]]) -> None:
        """Raise ManifestError for the first need, under its name or pattern, that isn't held whole."""
        for pattern, need in needs:
            for number, entry, wanted in self._lacking(pattern, need):
                tiles = self.tiles(number, entry)
                missing = self.missing(number, [layout for _, layout, _ in tiles], wanted)
                if missing is not None:
                    self._refuse(number, entry, missing if tiles else None)

    def _lacking(self, pattern: str, need: Need) -> Iterator[tuple[int, int, Wanted | None]]:
        """What of the need no group holds by itself: stored tensors, or entries of them, and cuts of these."""
        wanted = need.cuts, need.arranged
        if need.experts is None:
            number = self._number(pattern, None)
            if self._expert[number] != STACK:
                yield number, 0, wanted
                return
            spans = stored_region(need.cuts[:1])[0]
            yield from ((number, entry, (need.cuts[1:], None)) for start, stop in spans for entry in range(start, stop))
            return
        left = set(need.experts)
        for group in self._groups[self._numbers[pattern]] if pattern in self._numbers else ():
            shared = left.intersection(group.places or ())
            if shared and self.missing(self._number(pattern, min(shared)), group.parts, wanted) is None:
                left -= shared
        for expert in sorted(left):
            number = self._number(pattern, expert)
            plain = "{expert}" in pattern or self._expert[number] == STACK
            if plain:
                yield number, expert, wanted
            else:
                yield number, expert, None if need.arranged else ((Cut(((expert, expert + 1),)), *need.cuts), None)

    def _refuse(self, number: int, entry: int, missing: tuple[int, ...] | None) -> None:
        """Say what isn't there, and why."""
        name = self.checkpoint.names[number] + (f"[{entry}]" if self._expert[number] == STACK else "")
        what = f"{self.out} doesn't hold {name}"
        if missing is not None:
            what = f"{self.out} holds only a part of {name}: element [{', '.join(map(str, missing))}] is in no shard"
        if self.root.partial is not None:
            raise ManifestError(
                f"{what}, because it was made for ranks {format_ids(self.root.partial)} alone; ask for ranks that "
                f"need no more (--ranks), or start from an output of all ranks, or from the checkpoint"
            )
        raise ManifestError(f"{what}, and this plan needs it; start from the checkpoint, or run reshard check")

    def _number(self, pattern: str, expert: int | None) -> int:
        """The stored tensor of an expert, or the one of that name."""
        name = pattern if expert is None else pattern.replace("{expert}", str(expert))
        number = self.checkpoint.numbers.get(name)
        if number is None:
            raise ManifestError(f"{name} is named, which {self.out}'s checkpoint lacks; run reshard check")
        return number

    def _add(self, manifest: ShardManifest, tensor: ManifestTensor) -> None:
        """Take in one shard tensor, unless replicas hold all of it."""
        digests = tensor.chunks or bytes.fromhex(tensor.xxh3)
        held = HeldTensor(
            manifest.file, tensor.name, manifest.header_size + tensor.offset, tensor.nbytes, digests, self.chunks
        )
        used = False
        for piece in tensor.sources:
            each = tensor.shape if piece.experts is None else tensor.shape[1:]
            if rows_filled(piece, each) is None:
                raise ManifestError(f"{piece.tensor} doesn't cover whole rows")
            group = self._group(piece, piece.widened or tensor.dtype)
            if 0 in tensor.shape:
                continue
            layout = self._layout(piece, tensor.dtype)
            base = math.prod((*piece.at[:1], *each[1:])) * DTYPE_BITS[tensor.dtype] // 8 if piece.at else 0
            if layout not in group.parts:
                size = tensor.nbytes // tensor.shape[0] if piece.experts is not None else 0
                group.parts[layout] = Part(held, layout, base, size)
                used = True
        if used:
            self.chunks += max(1, -(-tensor.nbytes // CHUNK))

    def _group(self, piece: Piece, dtype: str) -> Group:
        """Where a piece belongs. The stored tensors must be of the shard's type."""
        number = self._numbers.setdefault(piece.tensor, len(self._groups))
        if number == len(self._groups):
            self._groups.append([])
        places: Places | None = None
        if piece.experts is not None:
            places = self._places.get(piece.experts)
            if places is None:
                places = self._places[piece.experts] = {id: at for at, id in enumerate(piece.experts)}
        found = next((group for group in self._groups[number] if group.places is places), None)
        if found is not None:
            return found
        group = Group(places)
        self._groups[number].append(group)
        apart = places is not None and not piece.stacked
        kinds = set()
        for expert in places if apart and places is not None else (None,):
            stored = self._number(piece.tensor, expert)
            as_what = STACK if piece.stacked else PLAIN if expert is None else expert
            if self._of[stored] >= 0 and (self._of[stored], self._expert[stored]) != (number, as_what):
                raise ManifestError(f"{self.checkpoint.names[stored]} is held under two patterns")
            self._of[stored], self._expert[stored] = number, as_what
            kinds.add((self.checkpoint.dtypes[stored], self.checkpoint.shapes[stored]))
        if len(kinds) > 1 or any(kind != dtype for kind, _ in kinds):
            raise ManifestError(f"{piece.tensor} is stored as {sorted(kinds)}, the shard holds {dtype}")
        shape = next((shape for _, shape in kinds), ())
        if piece.stacked and (not shape or max(piece.experts or (0,)) >= shape[0]):
            raise ManifestError(f"{piece.tensor} is stored as {sorted(kinds)}, which lacks some of the experts named")
        return group

    def _layout(self, piece: Piece, held: str) -> Layout:
        shape = self.shape(self._number(piece.tensor, piece.experts[0] if piece.experts else None))
        dtype = piece.widened or held
        key = dtype, held, shape, piece.cuts, piece.arranged
        if key not in self._layouts:
            self._layouts[key] = make_layout(dtype, shape, piece.cuts, piece.arranged, held)
        return self._layouts[key]
