"""The files of a checkpoint that is put together again: their headers, and an index of what is kept."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converter.backward.gather import Shards
from converter.backward.regions import Regions
from converter.output.carry import HEADERS, SOURCE
from converter.output.partial import partial_path, reserve
from converter.streams.writing import allocate, write_fault
from shard_plans.checkpoints.checkpoint import INDEX
from shard_plans.checkpoints.headers import Header, Kinds, load_json, read_header
from shard_plans.documents.manifest import SourceFileRecord
from shard_plans.errors import CheckpointError, ManifestError


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One stored tensor to be put together."""

    file: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Absolute byte offset in the file that is written."""
    size: int
    converted: bool = False
    """It is of the converted checkpoint alone."""
    content: bytes | None = None
    """All of it, where no shard holds it."""


def make_frame(
    shards: Shards, regions: Regions, file: SourceFileRecord, folder: Path, kinds: Kinds
) -> tuple[list[StoredTensor], int]:
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
    kept = [row for row, name in enumerate(header.names) if shards.holders(name) or regions.of(name)]
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
        StoredTensor(file.name, header.names[row], header.dtypes[row], header.shapes[row], start, sizes[row])
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


def smaller_index(out: Path, tensors: list[StoredTensor]) -> bytes:
    """The index without the tensors that were left out."""
    value = load_json((out / SOURCE / INDEX).read_text("utf-8"), INDEX)
    metadata = value.get("metadata") if isinstance(value, dict) else None
    metadata = {**(metadata if isinstance(metadata, dict) else {}), "total_size": sum(t.size for t in tensors)}
    weight_map = {tensor.name: tensor.file for tensor in sorted(tensors, key=lambda tensor: tensor.name)}
    return (json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2) + "\n").encode()
