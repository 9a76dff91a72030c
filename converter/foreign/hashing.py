"""The digests of tensors in files that nothing says anything about."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from converter.foreign.folder import Foreign
from converter.streams.buffers import aligned
from converter.streams.hashing import Digest, TensorHash
from converter.streams.reading import Reader
from converter.streams.workers import Meter, Progress, run_all
from shard_plans.checkpoints.headers import Header
from shard_plans.documents.digests import CHUNK
from shard_plans.errors import ManifestError

Hands = tuple[Reader, memoryview]


def digests(foreign: Foreign, workers: int, progress: Progress | None) -> dict[str, list[Digest]]:
    """Of every tensor, by file, in the order of their bytes."""
    found: dict[str, list[Digest]] = {}
    meter = Meter(sum(int(header.sizes.sum()) for header in foreign.headers.values()), progress)

    @contextmanager
    def worker() -> Iterator[Hands]:
        with Reader(foreign.path, ManifestError) as reader:
            yield reader, aligned(CHUNK).data

    def work(hands: Hands, item: tuple[str, Header]) -> None:
        reader, room = hands
        name, header = item
        found[name] = []
        for start, size in zip(header.starts.tolist(), header.sizes.tolist(), strict=True):
            state = TensorHash()
            for first in range(start, start + size, CHUNK):
                state.update(reader.read(name, first, room[: min(CHUNK, start + size - first)]))
            found[name].append(state.finish())
            meter.add(size)

    run_all(foreign.headers.items(), worker, work, workers)
    return found
