"""What a verb is given to read: a published checkpoint, or an output that stands for the one it was made from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import xxhash

from shard_plans.checkpoints.checkpoint import (
    CARRIED_LIMIT,
    INDEX,
    SINGLE,
    Checkpoint,
    from_headers,
    open_checkpoint,
)
from shard_plans.checkpoints.headers import HEADER_LIMIT, Header, Kinds, parse_header
from shard_plans.checkpoints.regular import open_regular
from shard_plans.documents.manifest import MARKER, ROOT, Manifest, read_manifest
from shard_plans.errors import CheckFailed, CheckpointError, ManifestError, using
from shard_plans.layouts.engine_files import engine_files

FAMILY = "family.yaml"
"""The family table in an output."""
SOURCE = "source"
"""Folder of an output for the files that were carried along."""
HEADERS = "source/headers"
"""Folder of an output for the source files' JSON headers, as they were."""


def open_stored(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`, or the one that the finished output in `folder` was made from, as its headers tell.

    Raises CheckpointError and ManifestError where it is neither, and CheckFailed where the output is damaged.
    """
    with using(folder, CheckpointError):
        if (folder / ROOT).is_file():
            return _kept(folder, read_manifest(folder))
        if (folder / MARKER).is_file():
            raise ManifestError(
                f"{folder} holds a conversion that isn't finished; give its command again, then this one"
            )
        refuse_unadopted(folder)
        return open_checkpoint(folder)


def unadopted(folder: Path) -> bool:
    """Whether an engine's own tool wrote the folder, and no manifest says what is in it."""
    told = any(os.path.lexists(folder / name) for name in (ROOT, MARKER, INDEX, SINGLE))
    return not told and engine_files(folder) is not None


def refuse_unadopted(folder: Path) -> None:
    """Raise ManifestError where a folder is such a one."""
    if unadopted(folder):
        raise ManifestError(
            f"{folder} was written by an engine, and nothing says what is in it: run reshard adopt {folder} "
            f"--checkpoint CHECKPOINT (or without, where its config.json is enough), then this again"
        )


def kept_family(out: Path) -> Path:
    """The family table that lies in an output. Raises CheckFailed where it isn't what it was."""
    stated = next((file for file in read_manifest(out).documents if file.name == FAMILY), None)
    if stated is None:
        raise ManifestError(f"{out / ROOT} lists no {FAMILY}; give the table with --family")
    _read(out / FAMILY, CARRIED_LIMIT, stated.xxh3)
    return out / FAMILY


def _kept(out: Path, root: Manifest) -> Checkpoint:
    """The checkpoint as columns, from what an output carries of it."""
    config = next((file for file in root.carried if file.name == "config.json"), None)
    if config is None:
        raise ManifestError(f"{out / ROOT} lists no config.json; the output can't stand for its checkpoint")
    kinds = Kinds()

    def headers() -> Iterator[tuple[str, Header]]:
        for file in sorted(root.source.files, key=lambda file: file.name):
            path = out / HEADERS / f"{file.name}.json"
            yield file.name, parse_header(path, _read(path, HEADER_LIMIT, file.header), file.size, kinds)

    raw = _read(out / SOURCE / "config.json", CARRIED_LIMIT, config.xxh3)
    found = from_headers(out, raw, headers(), tuple(sorted(file.name for file in root.carried)))
    stated = root.source.fingerprint, root.source.tensors, root.source.nbytes
    if (found.fingerprint, len(found), found.total_bytes) != stated:
        raise ManifestError(
            f"{out / ROOT} states the checkpoint {stated[0]} of {stated[1]} tensors and {stated[2]} bytes, the headers "
            f"kept beside it are of {found.fingerprint} with {len(found)} and {found.total_bytes}; convert again"
        )
    return replace(found, sharded=True, left_out=tuple(item.pattern for item in root.skipped))


def _read(path: Path, limit: int, digest: str) -> bytes:
    """The bytes of a document of an output. Raises CheckFailed where they don't have the digest stated."""
    try:
        with open(open_regular(path), "rb") as file:
            raw = file.read(limit + 1)
    except OSError as error:
        raise ManifestError(f"{path} can't be read: {error.strerror}; reshard check lists what is damaged") from error
    if len(raw) > limit:
        raise CheckpointError(f"{path} is longer than the {limit} bytes allowed for it")
    found = xxhash.xxh3_128_hexdigest(raw)
    if found != digest:
        raise CheckFailed(f"{path} has the digest {found}, {ROOT} states {digest}: it was changed or damaged")
    return raw
