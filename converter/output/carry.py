"""What an output carries beside weights: the checkpoint's small files and headers, the plan and the family table."""

from __future__ import annotations

import os
from collections.abc import Iterator

import xxhash

from converter.faults import SourceChanged
from converter.output.folder import OutputFolder
from converter.output.partial import partial_path, reserve
from converter.streams.writing import write_fault
from shard_plans.checkpoints.checkpoint import Checkpoint, inside
from shard_plans.checkpoints.headers import brief
from shard_plans.documents.manifest import CarriedFile
from shard_plans.errors import CheckpointError

PLAN = "plan.yaml"
FAMILY = "family.yaml"
SOURCE = "source"
"""Folder of the files that were carried along."""
HEADERS = "source/headers"
"""Folder of the source files' JSON headers, as they were."""
STEP = 1 << 20


def carried_names(checkpoint: Checkpoint) -> list[str]:
    """Where the checkpoint's small files go, relative to the output folder."""
    return [f"{SOURCE}/{name}" for name in checkpoint.carried]


def document_names(checkpoint: Checkpoint) -> list[str]:
    """Where the plan, the family table and the headers go, relative to the output folder."""
    return [PLAN, FAMILY, *(f"{HEADERS}/{file.name}.json" for file in checkpoint.files)]


def carry_files(checkpoint: Checkpoint, output: OutputFolder) -> tuple[CarriedFile, ...]:
    """Copy configuration, tokenizer and the like, as they are. Raises CheckpointError where config.json changed."""
    carried = []
    for name in checkpoint.carried:
        size, digest = _copy(checkpoint, name, 0, None, f"{SOURCE}/{name}", output)
        if name == "config.json" and digest != checkpoint.config_digest:
            raise SourceChanged(f"{checkpoint.folder / name} was changed while it was converted; run again")
        carried.append(CarriedFile(name, size, digest))
    return tuple(carried)


def carry_documents(checkpoint: Checkpoint, plan: str, family: str, output: OutputFolder) -> tuple[CarriedFile, ...]:
    """Write the plan, the family table and every source header. Raises CheckpointError where a header changed."""
    documents = []
    for name, text in ((PLAN, plan), (FAMILY, family)):
        documents.append(CarriedFile(name, *output.write(name, text.encode())))
    for file in checkpoint.files:
        name = f"{HEADERS}/{file.name}.json"
        size, digest = _copy(checkpoint, file.name, 8, file.header_size, name, output)
        if digest != file.header_digest:
            raise SourceChanged(f"the header of {checkpoint.folder / file.name} was changed since it was planned")
        documents.append(CarriedFile(name, size, digest))
    return tuple(documents)


def _copy(
    checkpoint: Checkpoint, name: str, start: int, length: int | None, target: str, output: OutputFolder
) -> tuple[int, str]:
    """Copy `length` bytes (all: None) of a source file from `start`; returns their number and digest."""
    state, size = xxhash.xxh3_128(), 0
    reserve(output.path, target, 0)
    path = partial_path(output.path, target)
    try:
        with open(path, "r+b") as file:
            for data in _blocks(checkpoint, name, start, length):
                state.update(data)
                size += len(data)
                file.write(data)
    except OSError as error:
        raise write_fault(path, error) from error
    return size, state.hexdigest()


def _blocks(checkpoint: Checkpoint, name: str, start: int, length: int | None) -> Iterator[bytes]:
    path = inside(checkpoint.folder, name)
    try:
        with open(path, "rb") as file:
            file.seek(start)
            left = os.fstat(file.fileno()).st_size - start if length is None else length
            while left:
                data = file.read(min(STEP, left))
                if not data:
                    raise SourceChanged(f"{path} ends {left} bytes early; it was changed while it was converted")
                left -= len(data)
                yield data
    except OSError as error:
        raise CheckpointError(f"{brief(str(path))} can't be read: {error.strerror}") from error
