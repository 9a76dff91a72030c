"""The deep check: every stored tensor is put together from the shards, block by block, and compared with the source."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from converter.backward.agreement import misfits
from converter.backward.gather import (
    BLOCK,
    Array,
    Held,
    Index,
    Shards,
    Span,
    blocks,
    growth,
    items,
    overlap,
    pick,
    put,
    viewed,
    whole,
)
from converter.backward.recomputed import Conversions, Kind, recompute, unmade
from converter.backward.regions import Regions, declared
from converter.backward.unheld import unfilled, unlisted
from converter.findings import Failure
from converter.precision.matrix import Matrix
from converter.sources.source import Source, StoredReader
from converter.streams.reading import Reader
from converter.streams.runs import Runs
from converter.streams.workers import Meter, run_all
from shard_plans.checkpoints.checkpoint import Checkpoint
from shard_plans.documents.manifest import ROOT, ConstantRegion
from shard_plans.errors import ManifestError
from shard_plans.placement.arrangement import widen


@dataclass(slots=True)
class _Hands:
    """What one worker thread holds."""

    source: StoredReader
    shards: Reader
    held: np.ndarray[Any, np.dtype[np.uint8]]


def compare(
    shards: Shards, origin: Source, workers: int, meter: Meter, made: Conversions | None = None
) -> list[Failure]:
    """Every difference between the shards, all replicas, and the checkpoint they were made from.

    Also: stored bytes that are nowhere, shard bytes that come from nowhere, and padding that isn't zero. A partial
    output is compared as far as it goes: nothing is said of bytes that it doesn't hold. What the plan converts is made
    again (`made`: what that is).
    """
    checkpoint = origin.checkpoint
    made = made or Conversions(checkpoint)
    failures = list(_claims(shards, checkpoint, made.kinds()))
    if failures:
        return failures  # what can't have come from this checkpoint can't be compared with it
    pieces = [piece for manifest in shards.manifests for tensor in manifest.tensors for piece in tensor.sources]
    origin.require((piece.tensor, piece) for piece in pieces if piece.converted is None)
    origin.require(need for source in made.sources() for need in source.drawn)
    origin.seals()
    absent: list[int] = []
    drawn = made.drawn()
    regions = Regions(shards.root.constants)

    @contextmanager
    def worker() -> Iterator[_Hands]:
        with origin.reader(BLOCK) as source, Reader(shards.out, ManifestError) as held:
            yield _Hands(source, held, np.empty(BLOCK, np.uint8))
            source.prove()

    def convert(hands: _Hands, matrix: Matrix) -> None:
        failures.extend(recompute(matrix, shards, made, hands.source, hands.shards, hands.held))

    def work(hands: _Hands, number: int) -> None:
        holders = shards.holders(checkpoint.names[number])
        constants = regions.of(checkpoint.names[number])
        if holders or constants:
            failures.extend(_tensor(hands, shards, checkpoint, number, holders, constants))
        elif not drawn[number]:
            absent.append(number)
        meter.add(int(checkpoint.sizes[number]))

    numbers = range(len(checkpoint))
    dealt = Runs(numbers, checkpoint.sizes[: len(numbers)].tolist(), workers) if origin.sequential else numbers
    run_all(dealt, worker, work, workers)
    run_all(made.matrices(), worker, convert, workers)
    origin.unchanged()
    failures += unfilled(shards)
    return failures if shards.root.partial is not None else [*failures, *unlisted(shards, checkpoint, sorted(absent))]


def _claims(shards: Shards, checkpoint: Checkpoint, made: Mapping[str, Kind]) -> Iterator[Failure]:
    """Files that the checkpoint has otherwise; pieces that name no stored tensor, or one of another type or shape."""
    files = {file.name: (file.size, file.header_digest) for file in checkpoint.files}
    for stated in shards.root.source.files:
        if files.get(stated.name, (stated.size, stated.header)) != (stated.size, stated.header):
            yield Failure(ROOT, None, f"says {stated.name} has {stated.size} bytes, or another header than it has")
    for manifest in shards.manifests:
        for tensor in manifest.tensors:
            for piece in tensor.sources:
                if piece.converted is not None:
                    for reason in unmade(piece, tensor, made):
                        yield Failure(manifest.file, tensor.name, reason)
                    continue
                ids = piece.experts
                names = [piece.tensor] if ids is None else [piece.tensor.replace("{expert}", str(i)) for i in ids]
                names = [piece.tensor] if piece.stacked else names
                kinds: dict[tuple[str, tuple[int, ...]], None] = {}
                for name in names:
                    number = checkpoint.numbers.get(name)
                    if number is None:
                        yield Failure(manifest.file, tensor.name, f"claims to hold {name}, which the checkpoint lacks")
                    else:
                        kinds[checkpoint.dtypes[number], checkpoint.shapes[number]] = None
                for dtype, shape in kinds:
                    for reason in misfits(piece, dtype, shape, tensor):
                        yield Failure(manifest.file, tensor.name, reason)


def _tensor(
    hands: _Hands,
    shards: Shards,
    checkpoint: Checkpoint,
    number: int,
    holders: Sequence[Held],
    constants: Sequence[ConstantRegion],
) -> Iterator[Failure]:
    """Compare one stored tensor with everyone who holds some of it, and with what is declared of it."""
    name, file = checkpoint.names[number], checkpoint.files[int(checkpoint.file_numbers[number])].name
    item, stored_shape = items(checkpoint.dtypes[number], checkpoint.shapes[number])
    shape = viewed(stored_shape, holders)
    if shape is None or (constants and shape != stored_shape):
        yield Failure(file, name, "is read as several shapes by the shards that hold it; it can't be put together")
        return
    position = int(checkpoint.starts[number])
    known = [declared(constant, checkpoint.dtypes[number], checkpoint.shapes[number]) for constant in constants]
    if None in known:
        said = f"{checkpoint.dtypes[number]} {list(checkpoint.shapes[number])}"
        yield Failure(ROOT, name, f"is declared to hold what {said} can't, or outside of it")
    wrong: set[int] = set()
    for block in blocks(shape, item, max(item, BLOCK // growth(holders))):
        lengths = [stop - start for start, stop in block]
        size = math.prod(lengths) * item
        view = hands.source.fetch(file, position, size)
        position += size
        stored = np.frombuffer(view, f"u{item}").reshape(lengths)
        covered: Array | None = None
        complete = False
        for who, held in enumerate(holders):
            found = overlap(held, block)
            if found is None:
                continue
            spans, indexes = found
            image = shards.read(hands.shards, held, spans, hands.held)
            expected = widen(pick(stored, indexes), image.itemsize)
            if who not in wrong and not np.array_equal(image, expected):
                wrong.add(who)
                yield _difference(shards, held, name, image != expected, indexes, block)
            complete = complete or whole(indexes, lengths)
            if not complete:
                covered = np.zeros(lengths, np.bool_) if covered is None else covered
                put(covered, indexes, True)
        for constant in known:
            content = constant.within(block) if constant is not None else None
            if content is None:
                continue
            part, values = content
            covered = np.zeros(lengths, np.bool_) if covered is None else covered
            covered[part] = True
            unequal = stored[part] != values
            if unequal.any():
                first = np.argwhere(unequal)[0] + [index.start for index in part]
                what = "zero" if isinstance(values, int) else f"{values.tolist()}"
                yield Failure(file, name, f"is declared {what} in {ROOT}, but isn't at {_words(first, block)}")
                return
        if shards.root.partial is None and not complete and (covered is None or not covered.all()):
            covered = np.zeros(lengths, np.bool_) if covered is None else covered
            where = _words(np.argwhere(~covered)[0], block)
            count = int(covered.size - np.count_nonzero(covered))
            yield Failure(file, name, f"{where} and {count - 1} more elements of this block are in no shard")
            return


def _difference(
    shards: Shards, held: Held, name: str, unequal: Array, indexes: Sequence[Index], block: Sequence[Span]
) -> Failure:
    """Where the first difference lies, in the words of the stored tensor."""
    first = np.argwhere(unequal)[0]
    at = [
        int(index.start + i if isinstance(index, slice) else index[i]) for index, i in zip(indexes, first, strict=True)
    ]
    expert = "" if held.position is None else f" (expert {held.position} of its stack)"
    count = int(np.count_nonzero(unequal))
    return Failure(
        shards.manifests[held.file].file,
        held.tensor.name,
        f"doesn't hold {name}{expert} as stored: {_words(np.array(at), block)} differs, {count} of {unequal.size} "
        f"elements compared do",
    )


def _words(at: Array, block: Sequence[Span]) -> str:
    places = [int(i) + start for i, (start, _) in zip(at, block, strict=True)]
    words = ("row", "column") if len(places) <= 2 else tuple(f"index {axis}:" for axis in range(len(places)))
    return ", ".join(f"{word} {place}" for word, place in zip(words, places, strict=False))
