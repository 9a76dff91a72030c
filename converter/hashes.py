"""Comparing the bytes of every tensor of an output with its digest: files are read in long runs, each by one thread."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash

from converter.findings import SHORT, Failure
from converter.streams.hashing import CHUNK
from converter.streams.reading import Reader
from converter.streams.workers import Meter, run_all
from shard_plans.documents.manifest import ManifestTensor, ShardManifest
from shard_plans.errors import ManifestError

RUN = 64 << 20
"""Bytes that one thread reads in a row, at most; whole chunks."""
STEP = 2 << 20
"""Bytes that it reads at a time: enough for the full speed of most disks, few enough to be still in the cache."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some chunks of a tensor: bytes `start` to `stop` of it."""

    tensor: ManifestTensor
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Run:
    """Pieces of tensors that follow one another in a file."""

    manifest: ShardManifest
    pieces: list[_Piece]

    @property
    def span(self) -> tuple[int, int]:
        """Where they lie in the file."""
        return _span(self.manifest, self.pieces[0])[0], _span(self.manifest, self.pieces[-1])[1]


def compare_hashes(out: Path, manifests: Iterable[ShardManifest], workers: int, meter: Meter) -> list[Failure]:
    """Tensors whose bytes don't have the digest stated; a manifest is asked for when its turn comes.

    Nothing is read ahead: while one thread hashes the others read, and few bytes in turn stay in the cache.
    """
    failures: list[Failure] = []

    @contextmanager
    def worker() -> Iterator[Reader]:
        with Reader(out, ManifestError, room=STEP, ahead=0) as reader:
            yield reader

    def compare(reader: Reader, run: _Run) -> None:
        start, stop = run.span
        reader.expect(run.manifest.file, [(start, stop)])
        for piece in run.pieces:
            try:
                failures.extend(_chunks(reader, run.manifest, piece))
            except ManifestError as error:
                failures.append(Failure(run.manifest.file, piece.tensor.name, str(error)))
        reader.passed(1 if start < stop else 0)
        meter.add(stop - start)

    run_all(_runs(out, manifests, failures), worker, compare, workers)
    return failures


def _span(manifest: ShardManifest, piece: _Piece) -> tuple[int, int]:
    """Where the piece lies in the file."""
    start = manifest.header_size + piece.tensor.offset
    return start + piece.start, start + piece.stop


def _runs(out: Path, manifests: Iterable[ShardManifest], failures: list[Failure]) -> Iterator[_Run]:
    """All tensors that lie in their file whole, in runs that one thread reads; others were reported with the file."""
    for manifest in manifests:
        try:
            size = (out / manifest.file).stat().st_size
        except OSError as error:
            failures.append(Failure(manifest.file, None, f"{SHORT} can't be read: {error.strerror}"))
            continue
        run, end = _Run(manifest, []), 0
        for tensor in sorted(manifest.tensors, key=lambda tensor: tensor.offset):
            if manifest.header_size + tensor.offset + tensor.nbytes > size:
                continue
            for start in range(0, max(tensor.nbytes, 1), RUN):
                piece = _Piece(tensor, start, min(start + RUN, tensor.nbytes))
                first, stop = _span(manifest, piece)
                if run.pieces and (first != end or stop - _span(manifest, run.pieces[0])[0] > RUN):
                    yield run
                    run = _Run(manifest, [])
                run.pieces.append(piece)
                end = stop
        if run.pieces:
            yield run


def _chunks(reader: Reader, manifest: ShardManifest, piece: _Piece) -> Iterator[Failure]:
    """The chunks of a piece that don't have their digest."""
    tensor, start = piece.tensor, manifest.header_size + piece.tensor.offset
    for first in range(piece.start, max(piece.stop, piece.start + 1), CHUNK):
        number, stop = first // CHUNK, min(first + CHUNK, piece.stop)
        state, at = xxhash.xxh3_128(), first
        while at < stop:
            view = reader.some(manifest.file, start + at, stop - at)
            state.update(view)
            at += len(view)
        found = state.hexdigest()
        stated = tensor.chunks[16 * number : 16 * number + 16].hex() if tensor.chunks else tensor.xxh3
        if found != stated:
            where = f"chunk {number}, bytes {start + first} to {start + stop} of the file"
            yield Failure(manifest.file, tensor.name, f"{where}: its digest is {found}, the manifest states {stated}")
