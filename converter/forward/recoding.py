"""The forward engine where precision changes: a stored matrix is read once, by bands, and every rank gets its part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from converter.forward.cutting import parts
from converter.forward.recode_units import RecodeUnit
from converter.precision.errors import Errors
from converter.precision.tops import Tops
from converter.sources.source import StoredReader
from converter.streams.sink import Sink
from shard_plans.checkpoints.checkpoint import Checkpoint
from shard_plans.checkpoints.dtypes import DTYPE_BITS
from shard_plans.errors import PlanError

Array = np.ndarray[Any, np.dtype[Any]]
COPIED = 1 << 20
"""Bytes of a block of what is only copied."""


def recode_unit(
    unit: RecodeUnit, sinks: Sequence[Sink], checkpoint: Checkpoint, reader: StoredReader, room: int,
    tops: Tops,
) -> list[Errors]:  # fmt: skip
    """Fill the unit's slices, one sink each; returns the errors of each matrix that was converted, in their order.

    `tops` are shared by all units (`Matrix.bands`).
    """
    found = []
    expect(unit, checkpoint, reader)
    for turn, member, matrix in unit.matrices:
        if matrix is None:
            _copy(unit, turn, member, sinks, checkpoint, reader)
            continue
        errors = Errors()
        for band in matrix.bands(reader, checkpoint, room, unit.rows, tops):
            for sink, part in zip(sinks, unit.slices, strict=True):
                kind = part.target.tensor.part
                if kind not in band.parts:
                    continue
                for piece in parts(band.parts[kind], band.first[kind], part.target.sources[member].cuts):
                    sink.take(piece)
            errors.add(band.errors)
        found.append(errors)
    for sink, part in zip(sinks, unit.slices, strict=True):
        if part.stop == part.target.tensor.nbytes:
            sink.zeros(part.stop - part.start - sink.seen)
        if sink.seen != part.stop - part.start:
            raise PlanError(
                f"bytes {part.start} to {part.stop} of shard tensor {part.target.tensor.name} are asked for, "
                f"its sources made {sink.seen}"
            )
    reader.forget()
    return found


def expect(unit: RecodeUnit, checkpoint: Checkpoint, reader: StoredReader) -> None:
    """Say which values will be read, so that they are read in large pieces."""
    spans: dict[str, list[tuple[int, int]]] = {}
    for _, _, matrix in unit.matrices:
        if matrix is None or matrix.turned:
            continue
        number = matrix.number
        start, size = int(checkpoint.starts[number]), int(checkpoint.sizes[number])
        rows = matrix.shape[0]
        low, high = unit.rows or (0, rows)
        name = checkpoint.files[int(checkpoint.file_numbers[number])].name
        spans.setdefault(name, []).append((start + low * size // max(rows, 1), start + high * size // max(rows, 1)))
    for name, listed in spans.items():
        reader.expect(name, sorted(set(listed)))


def _copy(
    unit: RecodeUnit, turn: int, member: int, sinks: Sequence[Sink], checkpoint: Checkpoint, reader: StoredReader
) -> None:
    """A stored tensor that is in the target's format already, laid beside one that wasn't."""
    for sink, part in zip(sinks, unit.slices, strict=True):
        source = part.target.sources[member]
        number = int(source.tensors[turn])
        shape, item = checkpoint.shapes[number], DTYPE_BITS[checkpoint.dtypes[number]] // 8
        name = checkpoint.files[int(checkpoint.file_numbers[number])].name
        row = math.prod(shape[1:]) * item
        step = max(1, COPIED // max(1, row))
        for first in range(0, shape[0], step):
            rows = min(step, shape[0] - first)
            data = np.empty(rows * row, np.uint8)
            reader.read(name, int(checkpoint.starts[number]) + first * row, data.data)
            for piece in parts(data.view(f"<u{item}").reshape(rows, *shape[1:]), first, source.cuts):
                sink.take(piece)
