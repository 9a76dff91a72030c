"""One shard file looked at before it is loaded: its size, whose it is, and its header, against its manifest."""

from __future__ import annotations

import json
import os
from pathlib import Path

import xxhash

from runtime.loading.reading import open_file
from shard_plans.checkpoints.headers import Kinds, read_header
from shard_plans.documents.manifest import Manifest, ShardManifest, read_shard_manifest
from shard_plans.errors import CheckpointError, ManifestError


def check_shard(out: Path, root: Manifest, name: str, check: bool = True) -> ShardManifest:
    """The manifest of the shard file `name` of the output folder `out`, after a look at the file; it isn't kept open.

    Raises ManifestError where the file is truncated, belongs to another rank, plan or checkpoint, or its header isn't
    what its manifest says.
    """
    manifest = read_shard_manifest(out, name, root)
    path = out / name
    _check_place(path, root, manifest)
    handle = open_file(path, ManifestError)
    try:
        size = os.fstat(handle).st_size
        if size != manifest.size:
            what = "truncated" if size < manifest.size else "another file"
            last = next(
                (t.name for t in manifest.tensors if manifest.header_size + t.offset + t.nbytes > size), None
            )  # fmt: skip
            where = f", which cuts tensor {last}" if last else ""
            raise ManifestError(
                f"{path} has {size} bytes{where}, its manifest states {manifest.size}: it is {what}; "
                "convert or copy it again"
            )
        _check_header(path, manifest, handle if check else None)
    finally:
        os.close(handle)
    return manifest


def _check_place(path: Path, root: Manifest, manifest: ShardManifest) -> None:
    """The manifest must stand for the coordinates of every rank that reads the file."""
    for rank in root.ranks:
        if path.name in rank.files:
            for axis, number in manifest.place.items():
                if getattr(rank.at, axis) != number:
                    raise ManifestError(
                        f"{path} is the file of {axis} {number}, but rank {rank.at.rank}, which reads it, stands at "
                        f"{axis} {getattr(rank.at, axis)}: it is another rank's file"
                    )


def _check_header(path: Path, manifest: ShardManifest, handle: int | None) -> None:
    """The file's own header against the manifest: whose it is, then what it holds, then its digest."""
    try:
        header = read_header(path, Kinds())
    except CheckpointError as fault:
        raise ManifestError(f"{path} can't be opened as a shard: {fault}") from fault
    place = json.dumps(manifest.place, separators=(",", ":"))
    for key, stated in (("place", place), ("plan", manifest.plan), ("source", manifest.source)):
        found = header.metadata.get(f"reshard_{key}")
        if found != stated:
            raise ManifestError(
                f"{path} says in its header that its {key} is {found}, its manifest states {stated}: it is the file of "
                f"another {'rank' if key == 'place' else 'plan' if key == 'plan' else 'checkpoint'}"
            )
    if 8 + header.header_size != manifest.header_size or len(header.names) != len(manifest.tensors):
        raise ManifestError(
            f"{path} has a header of {8 + header.header_size} bytes and {len(header.names)} tensors, its manifest "
            f"states {manifest.header_size} and {len(manifest.tensors)}"
        )
    rows = zip(header.names, header.dtypes, header.shapes, header.starts.tolist(), strict=True)
    for (name, dtype, shape, start), tensor in zip(rows, manifest.tensors, strict=True):
        expected = (tensor.name, tensor.dtype, tensor.shape, manifest.header_size + tensor.offset)
        if (name, dtype, shape, start) != expected:
            raise ManifestError(
                f"{path}, tensor {name}: its header says {dtype} {list(shape)} at byte {start}, its manifest states "
                f"{tensor.name}, {tensor.dtype} {list(tensor.shape)} at byte {expected[3]}"
            )
    if handle is not None:
        digest = xxhash.xxh3_128_hexdigest(os.pread(handle, manifest.header_size, 0))
        if digest != manifest.header_xxh3:
            raise ManifestError(
                f"{path} has a header with the digest {digest}, its manifest states {manifest.header_xxh3}: it was "
                "damaged or changed"
            )
