"""Manifests and documents for an engine's folder, written beside its files."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from converter.foreign.announced import Announced
from converter.foreign.folder import Foreign
from converter.foreign.matching import Match
from converter.foreign.recognise import Recognised
from converter.forward.manifests import manifest_name, root_manifest, shard_manifest
from converter.forward.shard_file import FileLayout
from converter.output.carry import (
    FAMILY,
    HEADERS,
    PLAN,
    SOURCE,
    carried_names,
    carry_documents,
    carry_files,
    document_names,
)
from converter.output.identity import Identity
from converter.output.partial import partial_path, publish, write_small
from converter.sources.opening import open_source
from converter.streams.hashing import Digest, file_digest
from shard_plans.checkpoints.checkpoint import read_small
from shard_plans.documents.manifest import ROOT, CarriedFile, ManifestFile, format_manifest
from shard_plans.documents.plan import format_plan, plan_digest
from shard_plans.documents.shard_manifest import format_shard_manifest
from shard_plans.errors import OutputError
from shard_plans.placement.shards import ShardFile

Files = tuple[CarriedFile, ...]


def make_room(seen: Recognised) -> list[str]:
    """Names of the folder's other files; what an interrupted adoption left is removed. Raises OutputError."""
    folder, checkpoint = seen.foreign.path, seen.binding.checkpoint
    manifests = map(manifest_name, seen.foreign.headers)
    for name in (*manifests, *document_names(checkpoint), *carried_names(checkpoint), ROOT):
        path = partial_path(folder, name)  # another file that ends so is the user's
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise OutputError(f"{path} is in the way and can't be removed: {error.strerror}") from error
    entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    inside = [entry.name for entry in entries if entry.is_dir() and entry.name != SOURCE]
    if inside:
        raise OutputError(f"{folder} holds the folder {inside[0]}, which can't belong to an output; move it elsewhere")
    return [entry.name for entry in entries if entry.is_file() and not entry.name.endswith(".safetensors")]


def write(seen: Recognised, found: Match, hashed: dict[str, list[Digest]], others: list[str]) -> None:
    """Write everything; with the root manifest, which comes last, the folder is an output."""
    foreign, checkpoint, folder = seen.foreign, seen.binding.checkpoint, seen.foreign.path
    identity = Identity(plan_digest(found.plan), checkpoint.fingerprint)
    files = []
    for layout in (layout for file in found.placement.files for layout in as_they_lie(foreign, file)):
        manifest = shard_manifest(layout, identity, hashed[layout.file.name], {})
        name = manifest_name(layout.file.name)
        _, digest = write_small(folder, name, format_shard_manifest(manifest))
        files.append(ManifestFile(layout.file.name, name, layout.size, digest))
    source, plan, table = open_source(checkpoint), format_plan(found.plan), seen.binding.family.document
    if seen.announced is None:
        carried, documents = carry_files(source, folder), carry_documents(source, plan, table, folder)
    else:
        carried, documents = _announced(seen.announced, folder, plan, table)
    names = [file.manifest for file in files] + [document.name for document in documents]
    for name in others:
        if name in names:
            raise OutputError(f"{folder / name} is in the way of what adopt writes; move it elsewhere")
    documents = (*documents, *(CarriedFile(name, *file_digest(folder / name)) for name in others))
    ranks = tuple((at, foreign.files.places[at.stage, at.tp]) for at, _ in found.placement.ranks)
    placement = replace(found.placement, ranks=ranks)
    root = root_manifest(source, identity, found.plan, placement, files, carried, documents)
    publish(folder, [*names, *(f"{SOURCE}/{file.name}" for file in carried)])
    write_small(folder, ROOT, format_manifest(root))
    publish(folder, [ROOT])


def as_they_lie(foreign: Foreign, file: ShardFile) -> list[FileLayout]:
    """The files of one rank as they are: parts, tensors in the order of their bytes, headers without padding."""
    tensors = {tensor.name: tensor for tensor in file.tensors}
    layouts = []
    for name in foreign.files.places[file.place["stage"], file.place["tp"]]:
        header = foreign.headers[name]
        with open(foreign.path / name, "rb") as opened:
            raw = opened.read(8 + header.header_size)
        held = ShardFile(name, file.place, tuple(tensors[tensor] for tensor in header.names))
        layouts.append(FileLayout(held, raw, tuple((header.starts - len(raw)).tolist()), header.size))
    return layouts


def _announced(announced: Announced, folder: Path, plan: str, table: str) -> tuple[Files, Files]:
    """Write what is carried along and the documents of a checkpoint that there is no file of."""
    texts = {PLAN: plan.encode(), FAMILY: table.encode()}
    texts |= {f"{HEADERS}/{name}.json": text for name, text in announced.headers.items()}
    documents = tuple(CarriedFile(name, *write_small(folder, name, text)) for name, text in texts.items())
    carried = []
    for name in announced.checkpoint.carried:
        text = announced.carried[name] if name in announced.carried else read_small(folder, name)
        carried.append(CarriedFile(name, *write_small(folder, f"{SOURCE}/{name}", text)))
    return tuple(carried), documents
