"""Convert: stream a checkpoint into the shard files of a plan."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from converter.check import check
from converter.forward.grouping import Group, make_groups
from converter.forward.scatter import scatter
from converter.forward.shard_file import FileLayout, lay_out
from converter.forward.tied import check_tied
from converter.output.carry import FAMILY, carried_names, carry_documents, carry_files, document_names
from converter.output.folder import Identity, OutputFolder
from converter.output.partial import PARTIAL, check_space, reserve
from converter.streams.hashing import Digest, hash_bytes
from converter.streams.reading import Reader
from converter.streams.workers import Meter, Progress, run_all
from converter.streams.writing import BUFFER, PENDING, Sink, Writer
from shard_plans.checkpoints.checkpoint import Checkpoint
from shard_plans.documents.manifest import (
    ROOT,
    CarriedFile,
    Manifest,
    ManifestFile,
    ManifestTensor,
    Piece,
    RankFiles,
    ShardManifest,
    SourceFileRecord,
    SourceRecord,
    format_manifest,
)
from shard_plans.documents.plan import Plan, format_plan, plan_digest
from shard_plans.documents.shard_manifest import format_shard_manifest
from shard_plans.errors import CheckpointError, OutputError, PlanError
from shard_plans.families.binding import Binding
from shard_plans.placement.shards import Placement

DOCUMENT_ROOM = 64 << 20
"""Bytes kept free for manifests beside what can be counted before."""


@dataclass(frozen=True, slots=True)
class ConvertResult:
    """What a conversion did."""

    bytes_read: int
    """Of the checkpoint's weights."""
    bytes_written: int
    """Of shard files; 0 where the same conversion lay there whole."""
    seconds: float
    ranks: int
    tensors: int
    """Tensors in all shard files."""
    skipped: int
    """Stored tensors that no rank holds."""


def convert(
    checkpoint: Checkpoint,
    binding: Binding,
    plan: Plan,
    placement: Placement,
    out: Path,
    workers: int = 4,
    progress: Progress | None = None,
) -> ConvertResult:
    """Write the files of `placement` into the folder `out`, or find them there whole.

    Raises OutputError where `out` can't be written or holds something else, CheckpointError where the checkpoint
    can't be read or contradicts itself, PlanError where the plan belongs to another checkpoint.
    """
    started = time.monotonic()
    identity = Identity(plan_digest(plan), checkpoint.fingerprint)
    if plan.checkpoint.fingerprint != identity.source:
        raise PlanError(
            f"the plan is for checkpoint {plan.checkpoint.fingerprint}, {checkpoint.folder} is {identity.source}; "
            f"make a plan for this one"
        )
    layouts = [lay_out(file, identity.plan, identity.source) for file in placement.files]
    shards = [layout.file.name for layout in layouts]
    manifests = [name.removesuffix(".safetensors") + ".json" for name in shards]
    others = [*document_names(checkpoint), *carried_names(checkpoint)]
    output = OutputFolder(out, identity, [*shards, *manifests, *others])
    tensors = sum(len(layout.file.tensors) for layout in layouts)
    skipped = sum(item.count for item in placement.skipped)
    found = output.finished()
    if found is not None:
        _confirm(found, checkpoint, binding, out, workers, progress)
        took = time.monotonic() - started
        return ConvertResult(checkpoint.total_bytes, 0, took, len(placement.ranks), tensors, skipped)
    if binding.doubled is not None:
        check_tied(checkpoint, binding.doubled)
    groups = make_groups(layouts, checkpoint)
    with output:
        check_space(out, sum(layout.size for layout in layouts) + _documents_size(checkpoint))
        for layout in layouts:
            reserve(out, layout.file.name, layout.size)
        move = _Move(checkpoint, layouts, output, Meter(sum(layout.file.nbytes for layout in layouts), progress))
        run_all(groups, move.worker, move.group, workers)
        carried = carry_files(checkpoint, output)
        documents = carry_documents(checkpoint, format_plan(plan), binding.family.document, output)
        files = []
        for number, (layout, name) in enumerate(zip(layouts, manifests, strict=True)):
            digests = [move.digests[number, index] for index in range(len(layout.file.tensors))]
            _, digest = output.write(name, format_shard_manifest(_shard_manifest(layout, identity, digests)))
            files.append(ManifestFile(layout.file.name, name, layout.size, digest))
        root = _root(checkpoint, identity, plan, placement, files, carried, documents)
        output.publish([*shards, *others])
        output.publish(manifests)
        output.write(ROOT, format_manifest(root))
        output.publish([ROOT])
    return ConvertResult(
        move.bytes_read, move.bytes_written, time.monotonic() - started, len(placement.ranks), tensors, skipped
    )


def _confirm(
    found: Manifest, checkpoint: Checkpoint, binding: Binding, out: Path, workers: int, progress: Progress | None
) -> None:
    """Make sure that the output in `out` is of these very bytes: another revision has the same names and shapes."""
    table = next((document.xxh3 for document in found.documents if document.name == FAMILY), "none")
    given = hash_bytes(binding.family.document.encode())
    if table != given:
        raise OutputError(
            f"{out} was made with another family table (digest {table}, this one is {given}); "
            f"choose another folder, or remove this one"
        )
    result = check(out, checkpoint.folder, workers, progress)
    if not result.passed:
        first = result.failures[0]
        raise OutputError(
            f"{out} holds a conversion by the same plan, but its bytes differ from {checkpoint.folder} "
            f"({len(result.failures)} places, the first: {first.file} {first.tensor or ''}: {first.reason}); "
            f"choose another folder, or remove this one"
        )


def _documents_size(checkpoint: Checkpoint) -> int:
    return DOCUMENT_ROOM + sum(file.header_size for file in checkpoint.files)


@dataclass(slots=True)
class _Hands:
    """What one worker thread holds."""

    reader: Reader
    writer: Writer
    buffer: np.ndarray[Any, np.dtype[np.uint8]]


class _Move:
    """Groups of tensors on their way from the checkpoint into partial files."""

    def __init__(
        self, checkpoint: Checkpoint, layouts: Sequence[FileLayout], output: OutputFolder, meter: Meter
    ) -> None:
        self.checkpoint, self.layouts, self.output, self.meter = checkpoint, layouts, output, meter
        self.digests: dict[tuple[int, int], Digest] = {}
        """Of each tensor, by the numbers of its file and of the tensor in it."""
        self.bytes_read = self.bytes_written = 0
        with Writer(output.path) as writer:
            for layout in layouts:
                writer.write(layout.file.name + PARTIAL, 0, memoryview(layout.header))

    @contextmanager
    def worker(self) -> Iterator[_Hands]:
        """A reader, a writer and a buffer for one thread."""
        sizes = {file.name: file.size for file in self.checkpoint.files}
        with Reader(self.checkpoint.folder, CheckpointError, sizes) as reader, Writer(self.output.path) as writer:
            yield _Hands(reader, writer, np.empty(BUFFER, np.uint8))
        with self.meter.lock:
            self.bytes_read += reader.bytes_read
            self.bytes_written += writer.bytes_written

    def group(self, hands: _Hands, group: Group) -> None:
        """Read what the group draws on, write and hash its tensors."""
        limit = min(PENDING, BUFFER // len(group.targets))
        sinks = [
            Sink(hands.writer, self.layouts[target.file].file.name + PARTIAL, target.start, limit, self.meter.add)
            for target in group.targets
        ]

        def read(file: int, offset: int, view: memoryview) -> None:
            hands.reader.read(self.checkpoint.files[file].name, offset, view)

        scatter(group, sinks, self.checkpoint, read, hands.buffer)
        for target, sink in zip(group.targets, sinks, strict=True):
            self.digests[target.file, target.index] = sink.finish()


def _shard_manifest(layout: FileLayout, identity: Identity, digests: Sequence[Digest]) -> ShardManifest:
    return ShardManifest(
        layout.file.name, layout.file.place, identity.plan, identity.source, layout.size, len(layout.header),
        hash_bytes(layout.header),
        tuple(
            ManifestTensor(
                tensor.name, tensor.dtype, tensor.shape, offset, tensor.nbytes, tensor.format, tensor.part,
                tensor.block, digest.xxh3, digest.chunks,
                tuple(Piece(source.pattern, source.experts, source.cuts, source.at) for source in tensor.sources),
            )
            for tensor, offset, digest in zip(layout.file.tensors, layout.offsets, digests, strict=True)
        ),
    )  # fmt: skip


def _root(
    checkpoint: Checkpoint, identity: Identity, plan: Plan, placement: Placement, files: Sequence[ManifestFile],
    carried: tuple[CarriedFile, ...], documents: tuple[CarriedFile, ...],
) -> Manifest:  # fmt: skip
    source = SourceRecord(
        identity.source,
        len(checkpoint),
        checkpoint.total_bytes,
        tuple(SourceFileRecord(file.name, file.size, file.header_digest) for file in checkpoint.files),
    )
    ranks = tuple(RankFiles(at, names) for at, names in placement.ranks)
    return Manifest(
        plan.checkpoint.family, identity.plan, source, carried, ranks, tuple(files), documents, placement.skipped
    )
