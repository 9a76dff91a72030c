"""What an output carries beside weights: the checkpoint's small files and headers, the plan and the family table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import xxhash

from converter.faults import SourceChanged
from converter.output.partial import partial_path, reserve, write_small
from converter.sources.source import Source, Stretch, blocks
from converter.streams.writing import write_fault
from shard_plans.checkpoints.checkpoint import Checkpoint
from shard_plans.checkpoints.headers import brief
from shard_plans.documents.manifest import CarriedFile
from shard_plans.documents.stored import FAMILY, HEADERS, SOURCE
from shard_plans.errors import CheckpointError

__all__ = [
    "FAMILY", "HEADERS", "PLAN", "SOURCE", "carried_names", "carry_documents", "carry_files", "document_names",
]  # fmt: skip

PLAN = "plan.yaml"
STEP = 1 << 20


def carried_names(checkpoint: Checkpoint) -> list[str]:
    """Where the checkpoint's small files go, relative to the output folder."""
    return [f"{SOURCE}/{name}" for name in checkpoint.carried]


def document_names(checkpoint: Checkpoint, beside: Sequence[str] = ()) -> list[str]:
    """Where plan, family table, headers and the copies `beside` the shards go, relative to the output folder."""
    return [PLAN, FAMILY, *(f"{HEADERS}/{file.name}.json" for file in checkpoint.files), *beside]


def carry_files(source: Source, folder: Path) -> tuple[CarriedFile, ...]:
    """Copy configuration, tokenizer and the like, as they are. Raises CheckpointError where one changed."""
    carried = []
    for name in source.checkpoint.carried:
        carried.append(CarriedFile(name, *_copy(source.carried(name), f"{SOURCE}/{name}", folder)))
    return tuple(carried)


def carry_documents(
    source: Source, plan: str, family: str, folder: Path, beside: Sequence[str] = ()
) -> tuple[CarriedFile, ...]:
    """Write the plan, the family table, every source header, and copies of the small files wanted `beside` the shards.

    Raises CheckpointError where a header changed.
    """
    documents = []
    for name, text in ((PLAN, plan), (FAMILY, family)):
        documents.append(CarriedFile(name, *write_small(folder, name, text.encode())))
    for file in source.checkpoint.files:
        name = f"{HEADERS}/{file.name}.json"
        documents.append(CarriedFile(name, *_copy(source.header(file), name, folder)))
    for name in beside:
        documents.append(CarriedFile(name, *_copy(source.carried(name), name, folder)))
    return tuple(documents)


def _copy(stretch: Stretch, target: str, folder: Path) -> tuple[int, str]:
    """Copy a stretch of a source file; returns the number of bytes and their digest. Raises SourceChanged."""
    state, size = xxhash.xxh3_128(), 0
    reserve(folder, target, 0)
    path = partial_path(folder, target)
    try:
        with open(path, "r+b") as file:
            for data in _read(stretch):
                state.update(data)
                size += len(data)
                file.write(data)
    except OSError as error:
        raise write_fault(path, error) from error
    if stretch.digest not in (None, state.hexdigest()):
        raise SourceChanged(
            f"{stretch.path} was changed since it was planned: its {size} bytes from {stretch.start} on have the "
            f"digest {state.hexdigest()}, not {stretch.digest}"
        )
    return size, state.hexdigest()


def _read(stretch: Stretch) -> Iterator[bytes]:
    try:
        yield from blocks(stretch, STEP)
    except OSError as error:
        raise CheckpointError(f"{brief(str(stretch.path))} can't be read: {error.strerror}") from error
    except EOFError as error:
        raise SourceChanged(
            f"{stretch.path} ends {error} bytes early; it was changed while it was converted"
        ) from error
