"""Units of work on their way from the checkpoint into partial files, and into the journal."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path

from converter.forward.batches import merged, read_whole
from converter.forward.recode_units import RecodeUnit
from converter.forward.scatter import scatter
from converter.forward.shard_file import FileLayout
from converter.forward.units import Slice, Unit
from converter.output.journal import Journal
from converter.output.partial import PARTIAL, partial_path, sync_all
from converter.precision.errors import Errors, unpack
from converter.precision.tops import Tops
from converter.sources.source import Source, StoredReader
from converter.streams.buffers import Bytes
from converter.streams.hashing import CHUNK, Digest, TensorHash, whole_digest
from converter.streams.reading import Reader
from converter.streams.sink import Place, Sink, Staging
from converter.streams.workers import Meter
from converter.streams.writing import Writer, write_fault
from shard_plans.errors import OutputError, ReshardError

COMMIT = 2.5
"""Seconds between entries of the journal; a crash loses about as much work."""
PROVE = 16
"""Bytes made for each byte that is left to read to prove them: from there on it is read for that alone."""


@dataclass(slots=True)
class Hands:
    """What one worker thread holds."""

    reader: StoredReader
    writer: Writer
    staging: Staging
    next: Sequence[int] = ()
    """The units of the batch that comes next."""
    spans: int = 0
    """How many spans its reader expects for it."""
    held: dict[int, bytes] = field(default_factory=dict)
    """Units that are written, with their digests, but not yet known to come from undamaged bytes."""


class Move:
    """Reads, writes and hashes units; keeps their digests, and vouches for them in the journal."""

    def __init__(
        self,
        source: Source,
        layouts: Sequence[FileLayout],
        copied: Sequence[Unit],
        converted: Sequence[RecodeUnit],
        out: Path,
        journal: Journal,
        meter: Meter,
        buffer: int,
    ) -> None:
        self.source, self.checkpoint, self.layouts, self.copied = source, source.checkpoint, layouts, copied
        self.units: Sequence[Unit | RecodeUnit] = [*copied, *converted]
        self.out, self.journal, self.meter, self.buffer = out, journal, meter, buffer
        self.bytes_read = self.bytes_written = self.bytes_kept = 0
        self._chunks: dict[tuple[int, int], bytearray] = {}
        """Digests of the chunks of each tensor, by the numbers of its file and of the tensor in it."""
        for layout_number, layout in enumerate(layouts):
            for index, tensor in enumerate(layout.file.tensors):
                self._chunks[layout_number, index] = bytearray(16 * max(1, -(-tensor.nbytes // CHUNK)))
        self.errors: dict[int, list[Errors]] = {}
        """What converting cost, by the number of the unit, for each matrix of it."""
        self.tops = Tops()
        self._pending: dict[int, bytes] = {}
        self._committing = threading.Lock()
        self._committer = ThreadPoolExecutor(1, "reshard-commit")
        self._commits: Future[None] | None = None
        """The last commit that was begun."""
        self._committed = time.monotonic()

    def digest(self, file: int, index: int) -> Digest:
        """Of a tensor, when all units are done."""
        return whole_digest(bytes(self._chunks[file, index]))

    def write_headers(self) -> None:
        """Write what comes before the data of each file."""
        with Writer(self.out) as writer:
            for layout in self.layouts:
                writer.write(layout.file.name + PARTIAL, 0, memoryview(layout.header))

    @contextmanager
    def verifier(self) -> Iterator[Reader]:
        """Reads the partial files, for one thread."""
        with Reader(self.out, OutputError, room=CHUNK) as reader:
            yield reader

    def verify(self, found: Mapping[int, bytes], good: set[int], reader: Reader, number: int) -> None:
        """Add the unit to `good` if its bytes on the disk have the digests found in the journal."""
        unit, stated = self.units[number], memoryview(found[number])
        for part in unit.slices:
            name, start = self.layouts[part.target.file].file.name + PARTIAL, part.target.start
            for first, last in part.pieces():
                state = TensorHash()
                state.update(reader.fetch(name, start + first, last - first))
                if state.chunks() != stated[:16]:
                    return
                stated = stated[16:]
        if len(stated) != unit.extra:
            return
        self._keep(number, found[number])
        with self.meter.lock:
            good.add(number)
            self.bytes_kept += unit.nbytes
        self.meter.add(unit.nbytes)

    @contextmanager
    def worker(self) -> Iterator[Hands]:
        """A reader, a writer and memory for one thread."""
        with self.source.reader(self.buffer) as reader, Writer(self.out) as writer:
            hands = Hands(reader, writer, Staging(self.buffer))
            yield hands
            self.do_next(hands)
            self.prove(hands, True)
        with self.meter.lock:
            self.bytes_read += reader.bytes_read
            self.bytes_written += writer.bytes_written

    def batch(self, hands: Hands, numbers: Sequence[int]) -> None:
        """Take a batch on: what its units draw on is read while the one before is done."""
        ranges = merged([found for number in numbers for found in read_whole(self.copied[number], self.checkpoint)])
        for file, start, stop in ranges:
            hands.reader.expect(self.checkpoint.files[file].name, [(start, stop)])
        self.do_next(hands)
        hands.next, hands.spans = numbers, sum(start < stop for _, start, stop in ranges)

    def do_next(self, hands: Hands) -> None:
        """Read what the batch draws on, in the order of the file; write and hash the stretches of its units."""
        numbers, hands.next = hands.next, ()
        if not numbers:
            return
        units = [self.copied[number] for number in numbers]
        parts = [part for unit in units for part in unit.slices]
        rooms = iter(hands.staging.shares([part.stop - part.start for part in parts]))

        def fetch(file: int, offset: int, length: int, unit: int) -> memoryview:
            return hands.reader.some(self.checkpoint.files[file].name, offset, length, unit)

        def read(file: int, offset: int, view: memoryview) -> memoryview:
            return hands.reader.read(self.checkpoint.files[file].name, offset, view)

        turns: list[tuple[tuple[int, int], int]] = [((-1, 0), order) for order in range(len(units))]
        sinks, steps = [], []
        for unit in units:
            sinks.append([self.sink(hands, part, next(rooms)) for part in unit.slices])
            steps.append(scatter(unit, sinks[-1], self.checkpoint, fetch, read, self.buffer))
        while turns:
            _, order = heappop(turns)
            place = next(steps[order], None)
            if place is not None:
                heappush(turns, (place, order))
            else:
                hands.held[numbers[order]] = b"".join(sink.finish() for sink in sinks[order])
        self.prove(hands)
        hands.reader.passed(hands.spans)
        hands.spans = 0

    def sink(self, hands: Hands, part: Slice, room: Bytes) -> Sink:
        """Where the bytes of a stretch go; `room` must be left alone until `prove` was called."""
        place = Place(self.partial_name(part.target.file), part.target.start, part.start, part.stop)
        return Sink(hands.writer, place, room, self.meter.add)

    def prove(self, hands: Hands, last: bool = False) -> None:
        """Take as done what a worker has written, once what it was made of is known to be undamaged."""
        hands.writer.finish()
        unproven = hands.reader.unproven
        if unproven and not last and sum(self.units[number].nbytes for number in hands.held) < PROVE * unproven:
            return
        if unproven:
            hands.reader.prove()
        while hands.held:
            self.done(*hands.held.popitem())

    def done(self, number: int, digests: bytes) -> None:
        """The unit's bytes are written: they will be vouched for when they are on the disk."""
        self._keep(number, digests)
        with self.meter.lock:
            self._pending[number] = digests
        with self._committing:
            if time.monotonic() - self._committed >= COMMIT and (self._commits is None or self._commits.done()):
                self._settle()
                self._commits = self._committer.submit(self._commit)  # the workers go on meanwhile
                self._committed = time.monotonic()

    def _settle(self) -> None:
        """Wait for the commit that was begun. Raises OutputError where it failed."""
        if self._commits is not None:
            self._commits.result()

    def finish(self, failed: bool = False) -> None:
        """Vouch for the rest; after a failure as far as that still works."""
        try:
            with suppress(ReshardError, OSError) if failed else nullcontext():
                self._settle()
                self._commit()
        finally:
            self._committer.shutdown()

    def _commit(self) -> None:
        """First the data, then the entries that vouch for them."""
        with self.meter.lock:
            taken, self._pending = self._pending, {}
        if not taken:
            return
        names = {self.layouts[part.target.file].file.name for number in taken for part in self.units[number].slices}
        try:
            sync_all([partial_path(self.out, name) for name in sorted(names)])
        except OSError as error:
            raise write_fault(self.out, error) from error
        self.journal.add(taken)

    def partial_name(self, file: int) -> str:
        """What the file is called until it is whole."""
        return self.layouts[file].file.name + PARTIAL

    def _keep(self, number: int, digests: bytes) -> None:
        """Put the digests of the unit's chunks where they belong in those of their tensors, and keep its errors."""
        unit, place = self.units[number], 0
        for part in unit.slices:
            for first, last in part.pieces():
                if part.whole_chunk(first, last):
                    self.keep_chunk(part.target.file, part.target.index, first // CHUNK, digests[place : place + 16])
                place += 16
        if unit.extra:
            self.errors[number] = unpack(digests[place:])

    def keep_chunk(self, file: int, index: int, chunk: int, digest: bytes) -> None:
        """The digest of a chunk of a tensor."""
        self._chunks[file, index][16 * chunk : 16 * chunk + 16] = digest
