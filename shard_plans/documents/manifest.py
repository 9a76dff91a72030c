"""The root manifest of an output folder: what was converted by which plan, which rank reads which files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from shard_plans.checkpoints.collector import undisturbed
from shard_plans.checkpoints.headers import brief, load_json
from shard_plans.checkpoints.regular import open_regular
from shard_plans.documents.digests import canonical_digest
from shard_plans.documents.manifest_records import (
    MARKER,
    ROOT,
    CarriedFile,
    ConstantRegion,
    Manifest,
    ManifestFile,
    Origin,
    RankFiles,
    SourceFileRecord,
    SourceRecord,
)
from shard_plans.documents.manifest_schema import RANK_KEYS, ROOT_FORMAT, schema_error
from shard_plans.documents.plan import NATIVE
from shard_plans.documents.shard_manifest import VERSION, parse_shard_manifest
from shard_plans.documents.shard_records import ManifestTensor, Piece, ShardManifest
from shard_plans.errors import CheckpointError, ManifestError
from shard_plans.placement.experts import format_ids, parse_ids
from shard_plans.placement.grid import Coordinate
from shard_plans.placement.shards import Skipped

__all__ = [
    "MARKER", "ROOT", "CarriedFile", "ConstantRegion", "Manifest", "ManifestFile", "ManifestTensor", "Origin", "Piece",
    "RankFiles", "ShardManifest", "SourceFileRecord", "SourceRecord", "format_manifest", "read_manifest",
    "read_shard_manifest", "root_digest",
]  # fmt: skip

MANIFEST_LIMIT = 1 << 30
"""Bytes of a manifest; a larger one is refused unread."""


def format_manifest(manifest: Manifest) -> bytes:
    """The root manifest as JSON with its digest; the same manifest gives the same bytes."""
    value = _value(manifest)
    value["digest"] = root_digest(value)
    return (json.dumps(value, indent=1) + "\n").encode("ascii")


def root_digest(value: Mapping[str, Any]) -> str:
    """The digest of a root manifest's JSON object: of everything but the key `digest`."""
    return canonical_digest({key: item for key, item in value.items() if key != "digest"})


def read_manifest(out: Path) -> Manifest:
    """The root manifest of the output folder `out`, checked against its schema and its digest.

    Raises ManifestError; a folder without one holds no finished conversion.
    """
    value = load_manifest(out / ROOT)
    what = str(out / ROOT)
    if not isinstance(value, dict) or value.get("format") != ROOT_FORMAT:
        raise ManifestError(f'{what} isn\'t a manifest of reshard: it has no "format": "{ROOT_FORMAT}"')
    if value.get("version") != VERSION:
        raise ManifestError(f"{what} is of version {brief(value.get('version'))}; this reshard reads version {VERSION}")
    if error := schema_error(value):
        raise ManifestError(f"{what}: {error}")
    digest = root_digest(value)
    if value["digest"] != digest:
        raise ManifestError(f"{what} states the digest {value['digest']}, but has {digest}: it was changed or damaged")
    manifest = _manifest(value)
    _check_names(manifest, what)
    return manifest


@undisturbed
def read_shard_manifest(out: Path, name: str, manifest: Manifest | None = None) -> ShardManifest:
    """The manifest of the shard file `name` of the output folder `out`, checked against the root manifest.

    `manifest` is the root manifest where it has been read already. Raises ManifestError.
    """
    root = manifest or read_manifest(out)
    entry = root.file(name)
    path = out / entry.manifest
    raw = _read(path)
    found = xxhash.xxh3_128_hexdigest(raw)
    if found != entry.xxh3:
        raise ManifestError(f"{path} has the digest {found}, {ROOT} states {entry.xxh3}: it was changed or damaged")
    shard = parse_shard_manifest(_parse(raw, path), str(path))
    for what, stated, expected in (
        ("is of the file", shard.file, name),
        ("is of the plan", shard.plan, root.plan),
        ("is of the checkpoint", shard.source, root.source.fingerprint),
        ("states the size", shard.size, entry.size),
    ):
        if stated != expected:
            raise ManifestError(f"{path} {what} {stated}, {ROOT} says {expected}: another output's file lies here")
    return shard


def load_manifest(path: Path) -> Any:
    """The JSON in a manifest file, parsed strictly."""
    return _parse(_read(path), path)


def _read(path: Path) -> bytes:
    try:
        with open(open_regular(path), "rb") as file:
            raw = file.read(MANIFEST_LIMIT + 1)
    except FileNotFoundError:
        raise ManifestError(f"{path} is missing; the folder holds no finished conversion") from None
    except OSError as error:
        raise ManifestError(f"{path} can't be read: {error.strerror}") from error
    if len(raw) > MANIFEST_LIMIT:
        raise ManifestError(f"{path} is longer than the {MANIFEST_LIMIT} bytes that a manifest may have")
    return raw


def _parse(raw: bytes, path: Path) -> Any:
    try:
        return load_json(raw.decode("ascii"), str(path))
    except UnicodeDecodeError as error:
        raise ManifestError(f"{path} isn't ASCII at byte {error.start}; a manifest is") from None
    except CheckpointError as error:
        raise ManifestError(str(error)) from None


def _check_names(manifest: Manifest, what: str) -> None:
    """File names must be told apart, and ranks must name files that are listed."""
    files = [entry.name for entry in manifest.files] + [entry.manifest for entry in manifest.files]
    for kind, names in (
        ("files", [*files, ROOT]),
        ("documents", [entry.name for entry in manifest.documents]),
        ("carried files", [entry.name for entry in manifest.carried]),
        ("source files", [entry.name for entry in manifest.source.files]),
        ("ranks", [str(rank.at.rank) for rank in manifest.ranks]),
    ):
        if len(set(names)) != len(names):
            raise ManifestError(f"{what} lists one of its {kind} twice")
    for rank in manifest.ranks:
        for name in sorted(set(rank.files).difference(files)):
            raise ManifestError(f"{what} gives rank {rank.at.rank} the file {name}, which it doesn't list")


def _value(manifest: Manifest) -> dict[str, Any]:
    source = manifest.source
    return {
        "format": ROOT_FORMAT,
        "version": VERSION,
        "family": manifest.family,
        "plan": manifest.plan,
        "source": {
            "fingerprint": source.fingerprint,
            "tensors": source.tensors,
            "bytes": source.nbytes,
            "files": [{"name": file.name, "size": file.size, "header": file.header} for file in source.files],
        },
        "carried": [_carried(file) for file in manifest.carried],
        "ranks": [{axis: getattr(rank.at, axis) for axis in RANK_KEYS} | {"files": list(rank.files)}
                  for rank in manifest.ranks],
        "files": [{"name": file.name, "manifest": file.manifest, "size": file.size, "xxh3": file.xxh3}
                  for file in manifest.files],
        "documents": [_carried(file) for file in manifest.documents],
        "skipped": [{"pattern": item.pattern, "count": item.count, "bytes": item.nbytes, "reason": item.reason}
                    for item in manifest.skipped],
        **({"constants": [{"pattern": item.pattern, "region": [list(span) for span in item.region],
                           "reason": item.reason, **({} if item.values is None else {"values": list(item.values)})}
                          for item in manifest.constants]} if manifest.constants else {}),
        **({} if manifest.partial is None else {"partial": format_ids(manifest.partial)}),
        **({} if manifest.layout == NATIVE else {"layout": manifest.layout}),
        **({"via": [{"plan": item.plan, "manifest": item.manifest} for item in manifest.via]} if manifest.via else {}),
    }  # fmt: skip


def _carried(file: CarriedFile) -> dict[str, Any]:
    return {"name": file.name, "size": file.size, "xxh3": file.xxh3}


def _manifest(value: Mapping[str, Any]) -> Manifest:
    source = value["source"]
    return Manifest(
        value["family"],
        value["plan"],
        SourceRecord(
            source["fingerprint"], source["tensors"], source["bytes"],
            tuple(SourceFileRecord(**entry) for entry in source["files"]),
        ),
        tuple(CarriedFile(**entry) for entry in value["carried"]),
        tuple(RankFiles(Coordinate(*(entry[key] for key in RANK_KEYS)), tuple(entry["files"]))
              for entry in value["ranks"]),
        tuple(ManifestFile(**entry) for entry in value["files"]),
        tuple(CarriedFile(**entry) for entry in value["documents"]),
        tuple(Skipped(entry["pattern"], entry["count"], entry["bytes"], entry["reason"])
              for entry in value["skipped"]),
        value["digest"],
        tuple(ConstantRegion(entry["pattern"], tuple((a, b) for a, b in entry["region"]), entry["reason"],
                             tuple(entry["values"]) if "values" in entry else None)
              for entry in value.get("constants", ())),
        parse_ids(value["partial"]) if "partial" in value else None,
        value.get("layout", NATIVE),
        tuple(Origin(**entry) for entry in value.get("via", ())),
    )  # fmt: skip
