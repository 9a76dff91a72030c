"""One part of a conversion, or all of it in one: its shard files and their manifests, under a journal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from converter.forward.batches import make_batches
from converter.forward.conversion import convert_unit, hash_chunk, matrix_errors, shared_chunks
from converter.forward.grouping import make_groups
from converter.forward.manifests import manifest_name, shard_manifest
from converter.forward.move import Move
from converter.forward.recode_units import RecodeUnit, make_recode_units
from converter.forward.shard_file import FileLayout
from converter.forward.units import Unit, make_units, units_digest
from converter.output.folder import OutputFolder
from converter.output.journal import Journal, head
from converter.output.partial import allocated, check_space, reserve_again, sync
from converter.sources.source import Source
from converter.streams.hashing import hash_bytes
from converter.streams.runs import Runs
from converter.streams.workers import Meter, Progress, run_all
from shard_plans.documents.conversions import ConvertedTensor, Tally
from shard_plans.documents.manifest import ManifestFile
from shard_plans.documents.shard_manifest import format_shard_manifest

DOCUMENT_ROOM = 64 << 20
"""Bytes kept free for manifests beside what can be counted before."""


@dataclass(frozen=True, slots=True)
class Made:
    """What was made, and how many bytes were moved for it."""

    files: tuple[ManifestFile, ...] = ()
    bytes_read: int = 0
    bytes_written: int = 0
    bytes_kept: int = 0
    converted: tuple[ConvertedTensor, ...] = ()
    """Weights whose precision changed, with their errors."""


def make_part(
    source: Source,
    family: str,
    layouts: Sequence[FileLayout],
    output: OutputFolder,
    workers: int,
    buffer: int,
    progress: Progress | None,
) -> Made:
    """Write the files of `layouts` and their manifests under their partial names; none is published yet.

    Raises SourceChanged where the checkpoint isn't what it was when this began, and what else `convert` raises.
    """
    checkpoint, out, names = source.checkpoint, output.path, [layout.file.name for layout in layouts]
    groups = make_groups(layouts, checkpoint)
    copied = make_units([group for group in groups if not group.converted], checkpoint)
    converted = make_recode_units([group for group in groups if group.converted])
    units: list[Unit | RecodeUnit] = [*copied, *converted]
    journal = Journal(
        output.journal, head(str(output.identity), units_digest(units), hash_bytes(family.encode()), source.seals())
    )
    try:
        found = journal.open()
        room = DOCUMENT_ROOM + sum(file.header_size for file in checkpoint.files)
        check_space(out, sum(layout.size for layout in layouts) + room - allocated(out, names))
        for layout in layouts:
            reserve_again(out, layout.file.name, layout.size)
        sync(out)  # so that what the journal will vouch for can be found
        meter = Meter(sum(unit.nbytes for unit in units), progress)
        move = Move(source, layouts, copied, converted, out, journal, meter, buffer)
        _move(move, found, workers)
        source.unchanged()
        errors = matrix_errors(move)
        files, tally = [], Tally()
        for number, layout in enumerate(layouts):
            digests = [move.digest(number, index) for index in range(len(layout.file.tensors))]
            name = manifest_name(layout.file.name)
            manifest = shard_manifest(layout, output.identity, digests, errors)
            tally.take([manifest])
            _, digest = output.write(name, format_shard_manifest(manifest))
            files.append(ManifestFile(layout.file.name, name, layout.size, digest))
    except BaseException:
        output.keep = output.keep or journal.entries > 0
        raise
    finally:
        journal.close()
    output.keep = True
    return Made(tuple(files), move.bytes_read, move.bytes_written, move.bytes_kept, tally.tensors())


def _move(move: Move, found: Mapping[int, bytes], workers: int) -> None:
    """Do every unit that isn't on the disk already; what the journal says is, is read again first."""
    good: set[int] = set()
    known = [number for number in sorted(found) if number < len(move.units)]
    run_all(known, move.verifier, lambda reader, number: move.verify(found, good, reader, number), workers)
    move.write_headers()
    left = [number for number in range(len(move.copied)) if number not in good]
    convert = [number for number in range(len(move.copied), len(move.units)) if number not in good]
    try:
        batches = make_batches(move.copied, left, move.checkpoint, move.buffer)
        run_all(_dealt(move, batches, workers), move.worker, move.batch, workers)
        single = _dealt(move, [[number] for number in convert], workers)
        run_all(single, move.worker, lambda hands, numbers: convert_unit(move, hands, numbers[0]), workers)
        shared = shared_chunks(move)
        run_all(shared, move.verifier, lambda reader, chunk: hash_chunk(move, reader, chunk), workers)
    except BaseException:
        move.finish(failed=True)
        raise
    move.finish()


def _dealt(move: Move, batches: list[list[int]], workers: int) -> Iterable[list[int]]:
    """The batches in order; of a source that is read best in order, from another place for each worker."""
    if not move.source.sequential:
        return batches
    return Runs(batches, [sum(move.units[number].nbytes for number in batch) for batch in batches], workers)
