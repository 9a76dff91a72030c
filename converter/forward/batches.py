"""Batches: units whose stored tensors lie among one another in a file, done together so that the file is read in order.

A layer's experts are stored one after the other, each with its scales; the shard tensors made of them draw on every
third or sixth tensor. Done one by one they would read many small ranges; together they read one large one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from converter.forward.grouping import needed
from converter.forward.units import Unit
from converter.streams.buffers import PAGE
from shard_plans.checkpoints.checkpoint import Checkpoint

BATCH = 256 << 20
"""Bytes of a batch, at most, unless a unit alone has more."""
GAP = 64 << 10
"""Bytes between two ranges that are rather read than skipped."""
SMALL = 8 << 20
"""Bytes of units that only follow one another and are done together, at most."""
WRITE = 1 << 20
"""Bytes that each stretch is written in, at least, where it has as many: fewer stretches fit in a batch then."""
Range = tuple[int, int, int]
"""File, first byte, end."""


def make_batches(units: Sequence[Unit], numbers: Sequence[int], checkpoint: Checkpoint, room: int) -> list[list[int]]:
    """The units of these numbers in batches, in the order of what they read; `room` is what is gathered for writing."""
    batches: list[list[int]] = []
    file: int | None = None
    end = size = gathered = 0
    for number in numbers:
        unit = units[number]
        where, first, last = _span(unit, checkpoint)
        more = sum(max(PAGE, min(part.stop - part.start, WRITE)) for part in unit.slices)
        among = first < end and size + unit.nbytes <= BATCH
        behind = first <= end + GAP and size + unit.nbytes <= SMALL
        if where == file and (among or behind) and gathered + more <= room:
            batches[-1].append(number)
            end, size, gathered = max(end, last), size + unit.nbytes, gathered + more
        else:
            batches.append([number])
            file, end, size, gathered = where, last, unit.nbytes, more
    return batches


def _span(unit: Unit, checkpoint: Checkpoint) -> Range:
    """From where to where the unit reads; of no file where it reads several, or only some rows of one tensor."""
    numbers = unit.numbers
    files = checkpoint.file_numbers[numbers]
    if not len(numbers) or unit.rows is not None or (files != files[0]).any():
        return -1 - int(numbers[0]) if len(numbers) else -1, 0, 0
    starts = checkpoint.starts[numbers]
    return int(files[0]), int(starts.min()), int((starts + checkpoint.sizes[numbers]).max())


def read_whole(unit: Unit, checkpoint: Checkpoint) -> Iterator[Range]:
    """The stored tensors of which the unit reads every row that it reads at all, as ranges of files."""
    numbers, members = unit.numbers, unit.members
    for place in range(members):
        column = numbers[place::members]
        shape = checkpoint.shapes[int(column[0])]
        sources = [part.target.sources[place] for part in unit.slices]
        if any(source.arranged is not None for source in sources):
            continue  # it is drawn from many places
        cuts = [source.cuts[:1] for source in sources]
        rows = shape[0] if shape else 1
        low, high = unit.rows or (0, rows)
        spans = needed([cut[0] for cut in cuts if cut]) if shape else [(0, 1)]
        if not any(a <= low and high <= b for a, b in spans):
            continue
        for number in column.tolist():
            start, row = int(checkpoint.starts[number]), int(checkpoint.sizes[number]) // max(rows, 1)
            yield int(checkpoint.file_numbers[number]), start + low * row, start + high * row


def merged(ranges: Sequence[Range]) -> list[Range]:
    """Ranges that follow one another closely as one, in order."""
    found: list[Range] = []
    for file, start, stop in sorted(ranges):
        if found and found[-1][0] == file and start <= found[-1][2] + GAP:
            found[-1] = file, found[-1][1], max(found[-1][2], stop)
        else:
            found.append((file, start, stop))
    return found
