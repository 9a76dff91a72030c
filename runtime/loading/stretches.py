"""What is read for a section: stretches of files, each by one thread, and where in the section's memory they go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from converter.streams.buffers import PAGE, page_down, page_up
from shard_plans.documents.digests import CHUNK
from shard_plans.documents.manifest import ManifestTensor, ShardManifest

LENGTH = 16 << 20
"""Bytes from which on a stretch ends at the next page that begins a chunk."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes `start` to `stop` of a file, which have one digest."""

    tensor: str
    start: int
    stop: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Stretch:
    """Chunks of a file that follow one another."""

    file: str
    start: int
    """The page of the file that the first one begins in."""
    place: int
    """Where in the section's memory that page goes: a page as well."""
    chunks: tuple[Chunk, ...]

    @property
    def stop(self) -> int:
        """The end of the last one."""
        return self.chunks[-1].stop


@dataclass(frozen=True, slots=True)
class Arranged:
    """How a section is read."""

    stretches: tuple[Stretch, ...]
    places: tuple[tuple[str, ManifestTensor, int], ...]
    """Each tensor's file, itself, and where it begins in the memory."""
    nbytes: int
    """Of the memory: whole pages."""


def arrange(wanted: Sequence[tuple[ShardManifest, Sequence[ManifestTensor]]]) -> Arranged:
    """Place tensors of some files in memory as they lie in the file, page for page."""
    stretches: list[Stretch] = []
    places: list[tuple[str, ManifestTensor, int]] = []
    end = 0
    for manifest, tensors in wanted:
        for run in _runs(tensors):
            chunks = [chunk for tensor in run for chunk in _chunks(manifest.header_size, tensor)]
            shift = end - page_down(chunks[0].start)
            places += [(manifest.file, tensor, manifest.header_size + tensor.offset + shift) for tensor in run]
            stretches += _split(manifest.file, chunks, shift)
            end = page_up(chunks[-1].stop + shift)
    return Arranged(tuple(stretches), tuple(places), end)


def _runs(tensors: Sequence[ManifestTensor]) -> Iterator[list[ManifestTensor]]:
    """Tensors that lie side by side."""
    run: list[ManifestTensor] = []
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.nbytes)):
        if run and tensor.offset != run[-1].offset + run[-1].nbytes:
            yield run
            run = []
        run.append(tensor)
    if run:
        yield run


def _chunks(header: int, tensor: ManifestTensor) -> Iterator[Chunk]:
    """The chunks of a tensor; an empty one has one."""
    begin, digests = header + tensor.offset, tensor.chunks or bytes.fromhex(tensor.xxh3)
    for number, start in enumerate(range(0, max(tensor.nbytes, 1), CHUNK)):
        stop = min(start + CHUNK, tensor.nbytes)
        yield Chunk(tensor.name, begin + start, begin + stop, digests[16 * number : 16 * number + 16])


def _split(file: str, chunks: Sequence[Chunk], shift: int) -> Iterator[Stretch]:
    """Stretches that share no page."""
    part: list[Chunk] = []
    for chunk in chunks:
        start = page_down(part[0].start) if part else 0
        if part and part[-1].stop % PAGE == 0 and part[-1].stop - start >= LENGTH:
            yield Stretch(file, start, start + shift, tuple(part))
            part = []
        part.append(chunk)
    start = page_down(part[0].start)
    yield Stretch(file, start, start + shift, tuple(part))
