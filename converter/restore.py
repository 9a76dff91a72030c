"""Restore: write the checkpoint again that an output was made from, bit for bit, from the output alone."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from converter.backward.converted_config import converted_config
from converter.backward.converted_frames import make_converted_frames
from converter.backward.frames import StoredTensor, make_frame, smaller_index
from converter.backward.gather import BLOCK, Array, Shards, blocks, growth, items, overlap, put, viewed, whole
from converter.backward.regions import Regions, declared
from converter.check import check
from converter.output.carry import PLAN, SOURCE
from converter.output.empty import empty_folder
from converter.output.partial import PARTIAL, check_space, partial_path, publish, reserve, write_small
from converter.streams.reading import Reader
from converter.streams.workers import Meter, Progress, run_all
from converter.streams.writing import Writer, write_fault
from shard_plans.checkpoints.checkpoint import INDEX
from shard_plans.checkpoints.headers import Kinds
from shard_plans.documents.manifest import read_manifest
from shard_plans.documents.plan import read_plan
from shard_plans.documents.stored import kept_family, open_stored, refuse_unadopted
from shard_plans.errors import CheckFailed, ManifestError, OutputError, using
from shard_plans.families.binding import bind
from shard_plans.families.family import read_family
from shard_plans.placement.arrangement import narrow
from shard_plans.placement.experts import format_ids
from shard_plans.placement.precision import in_precision


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """What was written."""

    files: int
    """Weight files."""
    tensors: int
    bytes_written: int
    """Of weights."""
    dropped: int
    """Tensors of the source that the output doesn't hold."""
    seconds: float


def restore(
    out: Path, folder: Path, workers: int = 4, progress: Progress | None = None, converted: bool = False
) -> RestoreResult:
    """Write the checkpoint in `out` into the new or empty `folder`: the same files with the same tensors in them.

    Where the plan changed the precision of weights that can't be; with `converted` they are written as they are now,
    under the names of their format, with a config.json and index that say so.

    Where all tensors of a file were kept, it comes back byte for byte; tensors that were left out are missing from
    header and index too. Raises CheckFailed where a digest is wrong, ManifestError, and OutputError for the folder.
    """
    with using(folder, OutputError):
        return _restored(out, folder, workers, progress, converted)


def _restored(out: Path, folder: Path, workers: int, progress: Progress | None, converted: bool) -> RestoreResult:
    started = time.monotonic()
    refuse_unadopted(out)
    _refuse_partial(out)
    if folder.resolve().is_relative_to(out.resolve()) or out.resolve().is_relative_to(folder.resolve()):
        raise OutputError(f"{folder} and the output {out} lie in one another; restore into a folder of its own")
    with empty_folder(folder):
        result = check(out, workers=workers)
        if not result.passed:
            first = result.failures[0]
            raise CheckFailed(
                f"{out} is damaged, so nothing is restored: {first.file}"
                f"{', tensor ' + first.tensor if first.tensor else ''} {first.reason}; reshard check lists everything"
            )
        root = read_manifest(out)
        shards, regions = Shards(out, root), Regions(root.constants)
        if shards.converted and not converted:
            raise ManifestError(
                f"{out} holds weights in another precision than its checkpoint (--weights), so that one can't be put "
                f"together from it; --converted writes the converted checkpoint"
            )
        check_space(folder, sum(file.size for file in root.source.files) + sum(file.size for file in root.carried))
        config: bytes | None = None
        if shards.converted:
            tensors, dropped, config = _converted(shards, regions, folder)
        else:
            tensors, dropped = _as_stored(shards, regions, folder)
        if dropped != sum(item.count for item in root.skipped):
            raise ManifestError(
                f"{out} lacks {dropped} tensors of its checkpoint, its skip list has "
                f"{sum(item.count for item in root.skipped)}; run reshard check --deep"
            )
        _assemble(shards, regions, folder, tensors, workers, Meter(sum(tensor.size for tensor in tensors), progress))
        files = list(dict.fromkeys(tensor.file for tensor in tensors))
        others = [file.name for file in root.carried]
        for name in others:
            if name == "config.json" and config is not None:
                write_small(folder, name, config)
            elif name == INDEX and (dropped or config is not None):
                write_small(folder, name, smaller_index(out, tensors))
            else:
                _copy(out / SOURCE / name, folder, name)
        publish(folder, [*files, *sorted(others, key=lambda name: (name == "config.json", name == INDEX, name))])
    written = sum(tensor.size for tensor in tensors)
    return RestoreResult(len(files), len(tensors), written, dropped, time.monotonic() - started)


def _as_stored(shards: Shards, regions: Regions, folder: Path) -> tuple[list[StoredTensor], int]:
    """Make the files of the checkpoint; its tensors, and how many were left out."""
    root, kinds = shards.root, Kinds()
    tensors: list[StoredTensor] = []
    dropped = 0
    for file in root.source.files:
        here, lost = make_frame(shards, regions, file, folder, kinds)
        tensors += here
        dropped += lost
    described = len(tensors) + dropped
    if described != root.source.tensors:
        raise ManifestError(
            f"the headers in {shards.out} describe {described} tensors, its checkpoint had {root.source.tensors}"
        )
    return tensors, dropped


def _converted(shards: Shards, regions: Regions, folder: Path) -> tuple[list[StoredTensor], int, bytes]:
    """Make the files of the converted checkpoint; its tensors, how many were left out, and its config.json."""
    checkpoint, plan = open_stored(shards.out), read_plan(shards.out / PLAN)
    binding = in_precision(bind(checkpoint, read_family(kept_family(shards.out))), plan.weights)
    config = converted_config(dict(checkpoint.config), binding, plan)
    return *make_converted_frames(shards, regions, checkpoint, binding, plan, folder), config


def _refuse_partial(out: Path) -> None:
    """A partial output holds no whole checkpoint."""
    try:
        root = read_manifest(out)
    except ManifestError:
        return  # the check says it better
    if root.partial is not None:
        raise ManifestError(
            f"{out} holds the files of ranks {format_ids(root.partial)} alone, so the checkpoint can't be put together "
            f"from it; restore from an output of all ranks"
        )


@dataclass(slots=True)
class _Hands:
    """What one worker thread holds."""

    shards: Reader
    writer: Writer
    block: Array
    held: Array


def _assemble(
    shards: Shards, regions: Regions, folder: Path, tensors: list[StoredTensor], workers: int, meter: Meter
) -> None:
    """Put every tensor together from the shards, and write it."""

    @contextmanager
    def worker() -> Iterator[_Hands]:
        with Reader(shards.out, ManifestError) as reader, Writer(folder) as writer:
            yield _Hands(reader, writer, np.empty(BLOCK, np.uint8), np.empty(BLOCK, np.uint8))

    def work(hands: _Hands, tensor: StoredTensor) -> None:
        if tensor.content is not None:
            hands.writer.write(tensor.file + PARTIAL, tensor.start, memoryview(tensor.content))
            return
        holders = shards.holders(tensor.name, tensor.converted)
        known = [declared(constant, tensor.dtype, tensor.shape) for constant in regions.of(tensor.name)]
        item, stored = items(tensor.dtype, tensor.shape)
        shape = viewed(stored, holders)
        if shape is None or (known and shape != stored):
            raise ManifestError(f"{tensor.name} is read as several shapes in {shards.out}; run reshard check --deep")
        position = tensor.start
        for block in blocks(shape, item, max(item, BLOCK // growth(holders))):
            lengths = [stop - start for start, stop in block]
            size = math.prod(lengths) * item
            made = hands.block[:size].view(f"u{item}").reshape(lengths)
            covered = np.zeros(lengths, np.bool_)
            for held in holders:
                found = overlap(held, block)
                if found is None:
                    continue
                put(made, found[1], narrow(shards.read(hands.shards, held, found[0], hands.held), item))
                put(covered, found[1], True)
                if whole(found[1], lengths) or covered.all():
                    break
            for constant in known:
                content = constant.within(block) if constant is not None else None
                if content is not None:
                    part, values = content
                    made[part] = np.where(covered[part], made[part], values)
                    covered[part] = True
            if not covered.all():
                raise ManifestError(f"{shards.out} lacks some of {tensor.name}; run reshard check --deep for where")
            hands.writer.write(tensor.file + PARTIAL, position, hands.block.data[:size])
            position += size
        meter.add(tensor.size)

    run_all(tensors, worker, work, workers)


def _copy(path: Path, folder: Path, name: str) -> None:
    reserve(folder, name, 0)
    try:
        shutil.copyfile(path, partial_path(folder, name))
    except OSError as error:
        raise write_fault(folder / name, error) from error
