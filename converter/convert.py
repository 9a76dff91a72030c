"""Convert: stream a checkpoint into the shard files of a plan."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from converter.check import check
from converter.faults import SourceChanged
from converter.forward.dealing import deal
from converter.forward.manifests import manifest_name, root_manifest
from converter.forward.part import Made, make_part
from converter.forward.selection import select
from converter.forward.shard_file import FileLayout, lay_out
from converter.options import ConvertOptions
from converter.output.carry import FAMILY, carried_names, carry_documents, carry_files, document_names
from converter.output.folder import Identity, OutputFolder
from converter.output.sums import write_sums
from converter.sources.opening import open_source
from converter.sources.source import Source
from converter.streams.buffers import PAGE, page_down
from converter.streams.hashing import hash_bytes
from converter.streams.workers import Progress
from shard_plans.checkpoints.checkpoint import Checkpoint
from shard_plans.documents.conversions import ConvertedTensor, Tally
from shard_plans.documents.manifest import ROOT, Manifest, format_manifest, read_shard_manifest
from shard_plans.documents.plan import Plan, format_plan, plan_digest
from shard_plans.errors import OutputError, PlanError
from shard_plans.families.binding import Binding
from shard_plans.layouts.registry import find_layout
from shard_plans.placement.shards import Placement

DEFAULT = ConvertOptions()
MEMORY = 128 << 20
"""Bytes of all workers' buffers together, at most."""


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
    bytes_kept: int = 0
    """Of shard files that an interrupted conversion had written; they were read again, and are right."""
    part: str | None = None
    """Which part was made, as `2/8`, where not everything; then `tensors` are those of its files."""
    missing: tuple[int, ...] = ()
    """Parts that aren't made yet; the root manifest is written when there are none."""
    fits: bool | None = None
    """Whether the plan's ranks fit its cards, as counted now; None without a cluster."""
    converted: tuple[ConvertedTensor, ...] = ()
    """Weights whose precision changed, with their errors; of the same conversion too where it lay there whole."""


def convert(
    checkpoint: Checkpoint,
    binding: Binding,
    plan: Plan,
    placement: Placement,
    out: Path,
    workers: int = 4,
    progress: Progress | None = None,
    options: ConvertOptions = DEFAULT,
) -> ConvertResult:
    """Write the files of `placement` into the folder `out`, or find them there whole.

    Raises OutputError where `out` can't be written or holds something else, CheckpointError where the checkpoint
    can't be read or contradicts itself, PlanError where the plan belongs to another checkpoint.
    """
    started = time.monotonic()
    placement = select(placement, options.ranks)
    part = options.part
    if plan.checkpoint.fingerprint != checkpoint.fingerprint:
        raise PlanError(
            f"the plan is for checkpoint {plan.checkpoint.fingerprint}, {checkpoint.folder} is "
            f"{checkpoint.fingerprint}; make a plan for this one"
        )
    source = open_source(checkpoint)
    if checkpoint.sharded and checkpoint.folder.resolve() in out.resolve().parents:
        raise OutputError(f"{out} and the output {checkpoint.folder} lie in one another; choose a folder of its own")
    via = source.via[-1].manifest if source.via else None
    identity = Identity(plan_digest(plan), checkpoint.fingerprint, options.ranks, part.count, via)
    layouts = [lay_out(file, identity.plan, identity.source) for file in placement.files]
    mine = deal(layouts, part.count)[part.number - 1]
    names, own = ([name for layout in some for name in _names(layout)] for some in (layouts, mine))
    beside = find_layout(plan.layout).beside(checkpoint.carried)
    others = [*document_names(checkpoint, beside), *carried_names(checkpoint)]
    output = OutputFolder(
        out, identity, [*names, *others], [layout.file.name for layout in mine], options.fresh, part,
        own if part.count > 1 else None,
    )  # fmt: skip
    result = ConvertResult(
        0, 0, 0.0, len(placement.ranks), sum(len(layout.file.tensors) for layout in mine),
        sum(item.count for item in placement.skipped), part=str(part) if part.count > 1 else None,
    )  # fmt: skip
    finished = output.finished()
    if finished is not None:
        output.tidy()
        _confirm(finished, source, binding, out, workers, progress)
        _sums(output, options, workers)
        kept = Tally()
        kept.take(read_shard_manifest(out, file.name, finished) for file in finished.files)
        return replace(
            result, bytes_read=checkpoint.total_bytes, seconds=time.monotonic() - started, converted=kept.tensors()
        )
    source.prepare(binding, placement)
    made = Made()
    with output:
        try:
            if not output.done:
                room = _room(options, workers, source)
                made = make_part(source, binding.family.document, mine, output, workers, room, progress)
                output.publish(layout.file.name for layout in mine)
                output.publish(manifest_name(layout.file.name) for layout in mine)
                output.record(made.files)
            missing = output.missing()
            if not missing:
                _finish(source, binding, plan, placement, output, others)
        except SourceChanged:
            output.keep = False
            raise
    _sums(output, options, workers)
    return replace(
        result, bytes_read=made.bytes_read, bytes_written=made.bytes_written, bytes_kept=made.bytes_kept,
        seconds=time.monotonic() - started, missing=missing, converted=made.converted,
    )  # fmt: skip


def _sums(output: OutputFolder, options: ConvertOptions, workers: int) -> None:
    """Write SHA-256 digests of a finished output, where they are asked for."""
    if options.sha256 and output.whole:
        write_sums(output.path, workers)


def _names(layout: FileLayout) -> tuple[str, str]:
    return layout.file.name, manifest_name(layout.file.name)


def _room(options: ConvertOptions, workers: int, source: Source) -> int:
    """Bytes that each worker reads, and writes, at a time: all together within the memory set aside for them."""
    return max(PAGE, page_down(min(options.buffer, MEMORY // ((1 + source.buffers) * max(1, workers)))))


def _finish(
    source: Source, binding: Binding, plan: Plan, placement: Placement, output: OutputFolder, others: list[str]
) -> None:
    """Write what belongs to no part, last of all the root manifest; of several processes one does it."""
    with output.alone() as free:
        if not free or output.whole:
            return  # another part is at it, or has done it
        output.clear([*others, ROOT])
        carried = carry_files(source, output.path)
        beside = find_layout(plan.layout).beside(source.checkpoint.carried)
        documents = carry_documents(source, format_plan(plan), binding.family.document, output.path, beside)
        made = output.files(file.name for file in placement.files)
        files = [made[file.name] for file in placement.files]
        root = root_manifest(source, output.identity, plan, placement, files, carried, documents)
        output.publish(others)
        output.write(ROOT, format_manifest(root))
        output.publish([ROOT])


def _confirm(
    found: Manifest, source: Source, binding: Binding, out: Path, workers: int, progress: Progress | None
) -> None:
    """Make sure that the output in `out` is of these very bytes: another revision has the same names and shapes."""
    table = next((document.xxh3 for document in found.documents if document.name == FAMILY), "none")
    given = hash_bytes(binding.family.document.encode())
    if table != given:
        raise OutputError(
            f"{out} was made with another family table (digest {table}, this one is {given}); "
            f"choose another folder, or remove this one"
        )
    checkpoint = source.checkpoint
    result = check(out, checkpoint.folder, workers, progress)
    if not result.passed:
        first = result.failures[0]
        raise OutputError(
            f"{out} holds a conversion by the same plan, but its bytes differ from {checkpoint.folder} "
            f"({len(result.failures)} places, the first: {first.file} {first.tensor or ''}: {first.reason}); "
            f"choose another folder, or remove this one"
        )
