"""Restore: write the checkpoint again that an output was made from, bit for bit, from the output alone."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from converter.backward.gather import BLOCK, Array, Shards, blocks, growth, items, overlap, put, whole
from converter.check import check
from converter.output.carry import HEADERS, SOURCE
from converter.output.partial import PARTIAL, check_space, partial_path, publish, remove_empty, reserve, write_small
from converter.streams.reading import Reader
from converter.streams.workers import Meter, Progress, run_all
from converter.streams.writing import Writer, allocate, write_fault
from shard_plans.checkpoints.checkpoint import INDEX
from shard_plans.checkpoints.headers import Header, Kinds, load_json, read_header
from shard_plans.documents.manifest import SourceFileRecord, read_manifest
from shard_plans.errors import CheckFailed, CheckpointError, ManifestError, OutputError


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


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One stored tensor to be put together."""

    file: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Absolute byte offset in the file that is written."""
    size: int


def restore(out: Path, folder: Path, workers: int = 4, progress: Progress | None = None) -> RestoreResult:
    """Write the checkpoint in `out` into the new or empty `folder`: the same files with the same tensors in them.

    Where all tensors of a file were kept, it comes back byte for byte; tensors that were left out are missing from
    header and index too. Raises CheckFailed where a digest is wrong, ManifestError, and OutputError for the folder.
    """
    started = time.monotonic()
    made = _empty_folder(folder)
    try:
        result = check(out, workers=workers)
        if not result.passed:
            first = result.failures[0]
            raise CheckFailed(
                f"{out} is damaged, so nothing is restored: {first.file}"
                f"{', tensor ' + first.tensor if first.tensor else ''} {first.reason}; reshard check lists everything"
            )
        root = read_manifest(out)
        shards = Shards(out, root)
        check_space(folder, sum(file.size for file in root.source.files) + sum(file.size for file in root.carried))
        kinds = Kinds()
        tensors: list[_Tensor] = []
        dropped = 0
        for file in root.source.files:
            here, lost = _frame(shards, file, folder, kinds)
            tensors += here
            dropped += lost
        described = len(tensors) + dropped
        if described != root.source.tensors:
            raise ManifestError(
                f"the headers in {out} describe {described} tensors, its checkpoint had {root.source.tensors}"
            )
        if dropped != sum(item.count for item in root.skipped):
            raise ManifestError(
                f"{out} lacks {dropped} tensors of its checkpoint, its skip list has "
                f"{sum(item.count for item in root.skipped)}; run reshard check --deep"
            )
        _assemble(shards, folder, tensors, workers, Meter(sum(tensor.size for tensor in tensors), progress))
        files = list(dict.fromkeys(tensor.file for tensor in tensors))
        others = [file.name for file in root.carried]
        for name in others:
            if name == INDEX and dropped:
                write_small(folder, name, _index(out, tensors))
            else:
                _copy(out / SOURCE / name, folder, name)
        publish(folder, [*files, *sorted(others, key=lambda name: (name == "config.json", name == INDEX, name))])
    except BaseException:
        _discard(folder, made)
        raise
    written = sum(tensor.size for tensor in tensors)
    return RestoreResult(len(files), len(tensors), written, dropped, time.monotonic() - started)


def _empty_folder(folder: Path) -> bool:
    """Make the folder; returns whether it wasn't there. Raises OutputError where something lies in it."""
    try:
        made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise OutputError(f"{folder} isn't empty; restore writes into a new or empty folder")
        if not os.access(folder, os.W_OK):
            raise OutputError(f"{folder} can't be written: no permission; choose another folder")
    except OSError as error:
        raise OutputError(f"{folder} can't be written: {error.strerror}; choose another folder") from error
    return made


def _discard(folder: Path, made: bool) -> None:
    for path in folder.glob(f"*{PARTIAL}"):
        path.unlink(missing_ok=True)
    if made:
        remove_empty(folder)


def _frame(shards: Shards, file: SourceFileRecord, folder: Path, kinds: Kinds) -> tuple[list[_Tensor], int]:
    """Make the partial file of a source file with its header; its kept tensors and the number of others."""
    raw = (shards.out / HEADERS / f"{file.name}.json").read_bytes()
    path = partial_path(folder, file.name)
    reserve(folder, file.name, 0)
    try:
        with open(path, "r+b") as handle:
            handle.write(len(raw).to_bytes(8, "little") + raw)
            handle.truncate(file.size)
    except OSError as error:
        raise write_fault(path, error) from error
    try:
        header = read_header(path, kinds)
    except CheckpointError as error:
        raise ManifestError(f"the header kept for {file.name} can't be its own: {error}") from error
    kept = [row for row, name in enumerate(header.names) if shards.holders(name)]
    starts, end = header.starts.tolist(), file.size
    if len(kept) < len(header.names):
        path.unlink()
        if not kept:
            return [], len(header.names)
        raw, starts, end = _smaller_header(header, kept)
        reserve(folder, file.name, 0)
    try:
        with open(path, "r+b") as handle:
            handle.write(len(raw).to_bytes(8, "little") + raw)
            handle.flush()
            allocate(handle.fileno(), end)
    except OSError as error:
        raise write_fault(path, error) from error
    sizes = header.sizes.tolist()
    rows = [
        _Tensor(file.name, header.names[row], header.dtypes[row], header.shapes[row], start, sizes[row])
        for row, start in zip(kept, starts, strict=True)
    ]
    return rows, len(header.names) - len(kept)


def _smaller_header(header: Header, kept: list[int]) -> tuple[bytes, list[int], int]:
    """The header without the tensors that were left out, where those kept start, and the size of the file."""
    entries: dict[str, Any] = {"__metadata__": dict(header.metadata)} if header.metadata else {}
    starts, end = [], 0
    for row in kept:
        size = int(header.sizes[row])
        entries[header.names[row]] = {
            "dtype": header.dtypes[row], "shape": header.shapes[row], "data_offsets": [end, end + size],
        }  # fmt: skip
        starts.append(end)
        end += size
    raw = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    return raw, [8 + len(raw) + start for start in starts], 8 + len(raw) + end


@dataclass(slots=True)
class _Hands:
    """What one worker thread holds."""

    shards: Reader
    writer: Writer
    block: Array
    held: Array


def _assemble(shards: Shards, folder: Path, tensors: list[_Tensor], workers: int, meter: Meter) -> None:
    """Put every tensor together from the shards, and write it."""

    @contextmanager
    def worker() -> Iterator[_Hands]:
        with Reader(shards.out, ManifestError) as reader, Writer(folder) as writer:
            yield _Hands(reader, writer, np.empty(BLOCK, np.uint8), np.empty(BLOCK, np.uint8))

    def work(hands: _Hands, tensor: _Tensor) -> None:
        holders = shards.holders(tensor.name)
        item, shape = items(tensor.dtype, tensor.shape)
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
                put(made, found[1], shards.read(hands.shards, held, found[0], hands.held))
                put(covered, found[1], True)
                if whole(found[1], lengths) or covered.all():
                    break
            if not covered.all():
                raise ManifestError(f"{shards.out} lacks some of {tensor.name}; run reshard check --deep for where")
            hands.writer.write(tensor.file + PARTIAL, position, hands.block.data[:size])
            position += size
        meter.add(tensor.size)

    run_all(tensors, worker, work, workers)


def _index(out: Path, tensors: list[_Tensor]) -> bytes:
    """The index without the tensors that were left out."""
    value = load_json((out / SOURCE / INDEX).read_text("utf-8"), INDEX)
    metadata = value.get("metadata") if isinstance(value, dict) else None
    metadata = {**(metadata if isinstance(metadata, dict) else {}), "total_size": sum(t.size for t in tensors)}
    weight_map = {tensor.name: tensor.file for tensor in sorted(tensors, key=lambda tensor: tensor.name)}
    return (json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2) + "\n").encode()


def _copy(path: Path, folder: Path, name: str) -> None:
    reserve(folder, name, 0)
    try:
        shutil.copyfile(path, partial_path(folder, name))
    except OSError as error:
        raise write_fault(folder / name, error) from error
