"""Check: is every byte of an output what its manifests say and, deep, what the checkpoint says."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import xxhash

from converter.adopt import look_at
from converter.backward.agreement import disagreements
from converter.backward.deep import compare
from converter.backward.gather import Shards
from converter.backward.planned import departures
from converter.backward.recomputed import conversions
from converter.findings import SHORT, CheckResult, Failure, summed_up
from converter.hashes import compare_hashes
from converter.output.carry import PLAN, SOURCE
from converter.output.parts import is_leftover, unfinished_words
from converter.output.sums import SUMS
from converter.sources.opening import open_source
from converter.sources.source import Source
from converter.streams.hashing import file_digest
from converter.streams.workers import READERS, Meter, Progress
from shard_plans.checkpoints.headers import Kinds, read_header
from shard_plans.checkpoints.regular import open_regular
from shard_plans.documents.manifest import (
    ROOT,
    Manifest,
    ShardManifest,
    read_manifest,
    read_shard_manifest,
)
from shard_plans.documents.plan import NATIVE, read_plan
from shard_plans.documents.stored import open_stored, refuse_unadopted, unadopted
from shard_plans.errors import CheckpointError, ManifestError, ReshardError, using

__all__ = ["CheckResult", "Failure", "check"]


def check(out: Path, deep: Path | None = None, workers: int = READERS, progress: Progress | None = None) -> CheckResult:
    """Check the finished output `out`; with `deep`, also put that checkpoint together from it and compare.

    Of an engine's own folder, which has no manifests, names, types and shapes are compared. Raises ManifestError where
    there is neither, CheckpointError where `deep` isn't its checkpoint.
    """
    with using(out, ManifestError):
        return _checked(out, deep, workers, progress)


def _checked(out: Path, deep: Path | None, workers: int, progress: Progress | None) -> CheckResult:
    if unadopted(out):
        if deep is not None:
            refuse_unadopted(out)
        return look_at(out)
    if not (out / ROOT).is_file():
        words = unfinished_words(out)
        raise ManifestError(
            f"{out} holds no {ROOT}: it isn't an output of reshard, or its conversion isn't finished{words}"
        )
    checkpoint = open_stored(deep) if deep is not None else None
    try:
        root = read_manifest(out)
    except ManifestError as error:
        return summed_up(0, 0, [Failure(ROOT, None, str(error))])
    if checkpoint is not None and checkpoint.fingerprint != root.source.fingerprint:
        raise CheckpointError(
            f"{out} was made from checkpoint {root.source.fingerprint}, {deep} is {checkpoint.fingerprint}; "
            f"compare with the one it was made from"
        )
    failures = [*_documents(out, root), *_foreign(out, root)]
    unread: list[Failure] = []
    broken: list[Failure] = []
    manifests: list[ShardManifest] = []
    meter = Meter(sum(file.size for file in root.files) + (checkpoint.total_bytes if checkpoint else 0), progress)

    def read() -> Iterator[ShardManifest]:
        """The manifests of the files, while those before are compared."""
        for file in root.files:
            try:
                manifests.append(read_shard_manifest(out, file.name, root))
            except ManifestError as error:
                unread.append(Failure(file.manifest, None, str(error)))
                continue
            broken.extend(_frame(out, manifests[-1], root.layout == NATIVE))
            meter.add(manifests[-1].header_size)
            yield manifests[-1]

    wrong = compare_hashes(out, read(), workers, meter)
    failures += unread + broken + wrong
    if not unread:
        shards = Shards(out, root, manifests)
        failures += disagreements(shards)
        lost = {failure.file for failure in broken if failure.reason.startswith(SHORT)}
        if checkpoint is not None and not lost:
            origin = open_source(checkpoint)
            try:
                failures += _compared(shards, origin, workers, meter)
            except ManifestError as error:
                if not failures:  # all was read right before: it may be the checkpoint, where that is an output
                    raise
                failures.append(Failure(ROOT, None, f"the comparison with the checkpoint ended early: {error}"))
            if not failures:  # else the fault is named already, and its consequences would hide it
                failures += departures(shards, origin)
    tensors = sum(len(manifest.tensors) for manifest in manifests)
    result = summed_up(len(root.files), tensors, failures, _absent(out, root))
    return replace(result, skipped=sum(item.count for item in root.skipped))


def _compared(shards: Shards, origin: Source, workers: int, meter: Meter) -> list[Failure]:
    try:
        made = conversions(shards, origin.checkpoint)
    except ReshardError as error:
        return [Failure(PLAN, None, f"can't be laid out again: {error}")]
    return compare(shards, origin, workers, meter, made)


def _absent(out: Path, root: Manifest) -> tuple[int, ...]:
    """Ranks of the plan that the output wasn't made for."""
    if root.partial is None:
        return ()
    try:
        world = read_plan(out / PLAN).grid.world
    except ReshardError:
        return ()  # reported with the documents
    return tuple(sorted(set(range(world)).difference(root.partial)))


def _documents(out: Path, root: Manifest) -> Iterator[Failure]:
    """Documents and carried files that aren't there as stated."""
    stated = [(file.name, file) for file in root.documents]
    for name, file in [*stated, *((f"{SOURCE}/{file.name}", file) for file in root.carried)]:
        try:
            size, digest = file_digest(out / name)
        except OSError as error:
            yield Failure(name, None, f"can't be read: {error.strerror}; {ROOT} lists it")
            continue
        if (size, digest) != (file.size, file.xxh3):
            yield Failure(name, None, f"has {size} bytes of digest {digest}, {ROOT} states {file.size} of {file.xxh3}")


def _foreign(out: Path, root: Manifest) -> Iterator[Failure]:
    """Files that no manifest lists, and folders that can't be looked into for them."""
    known = {ROOT, SUMS, *(file.name for file in root.documents)}
    known |= {f"{SOURCE}/{file.name}" for file in root.carried}
    known |= {name for file in root.files for name in (file.name, file.manifest)}
    closed: list[OSError] = []
    for base, _, names in os.walk(out, onerror=closed.append):
        for name in names:
            path = os.path.relpath(os.path.join(base, name), out)
            if path not in known and not is_leftover(path):
                yield Failure(path, None, f"isn't part of this output: {ROOT} doesn't list it")
    for error in closed:
        yield Failure(os.path.relpath(error.filename or out, out), None, f"can't be looked into: {error.strerror}")


def _frame(out: Path, manifest: ShardManifest, native: bool) -> Iterator[Failure]:
    """What is wrong around the tensors of a shard file: its size, its header, and what the header says.

    A file that an engine wrote doesn't say whose it is.
    """
    path, name = out / manifest.file, manifest.file
    try:
        size = path.stat().st_size
        with open(open_regular(path), "rb") as file:
            digest = xxhash.xxh3_128_hexdigest(file.read(manifest.header_size))
    except OSError as error:
        yield Failure(name, None, f"{SHORT} can't be read: {error.strerror}")
        return
    if size != manifest.size:
        cut = next((t for t in manifest.tensors if manifest.header_size + t.offset + t.nbytes > size), None)
        what = f"from tensor {cut.name} on it isn't whole" if cut else "it has a tail"
        reason = f"{SHORT} has {size} bytes, its manifest states {manifest.size}; {what}"
        yield Failure(name, cut.name if cut else None, reason)
        return
    if digest != manifest.header_xxh3:
        region = f"header, bytes 0 to {manifest.header_size}"
        yield Failure(name, None, f"{region}: its digest is {digest}, the manifest states {manifest.header_xxh3}")
        return
    try:
        header = read_header(path, Kinds())
    except CheckpointError as error:
        yield Failure(name, None, str(error))
        return
    place = json.dumps(manifest.place, separators=(",", ":"))
    said = {"place": place, "plan": manifest.plan, "source": manifest.source}
    adopted = not native and not any(key.startswith("reshard_") for key in header.metadata)
    for key, value in said.items() if not adopted else ():
        if header.metadata.get(f"reshard_{key}") != value:
            found = header.metadata.get(f"reshard_{key}")
            yield Failure(name, None, f"the header's reshard_{key} is {found}, the manifest states {value}")
    columns = zip(header.dtypes, header.shapes, header.starts.tolist(), header.sizes.tolist(), strict=True)
    found_tensors = dict(zip(header.names, columns, strict=True))
    for t in manifest.tensors:
        expected = (t.dtype, t.shape, manifest.header_size + t.offset, t.nbytes)
        if found_tensors.pop(t.name, None) != expected:
            yield Failure(name, t.name, f"the header describes it differently from the manifest, which has {expected}")
    for left in found_tensors:
        yield Failure(name, left, "is in the header, but not in the manifest")
