"""A stored matrix on its way to another format: its codings, the bands of rows it is done in, and reading them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from converter.precision.codec import Coding
from converter.precision.errors import Errors
from converter.precision.recode import band_rows, recode, top
from converter.precision.scales import of_matrix
from converter.precision.tops import Tops
from shard_plans.checkpoints.checkpoint import Checkpoint
from shard_plans.checkpoints.dtypes import DTYPE_BITS
from shard_plans.errors import PlanError
from shard_plans.families.parameter import Parameter, Part, logical_shape

Array = np.ndarray[Any, np.dtype[Any]]
Rows = tuple[int, int]


class Reads(Protocol):
    """Reads ranges of the checkpoint's files, for one thread."""

    def read(self, name: str, offset: int, view: memoryview) -> memoryview:
        """Fill `view` with the bytes from `offset` of the file `name`, and return it."""

    def fetch(self, name: str, offset: int, length: int) -> memoryview:
        """The same as a view into a buffer that the next call may fill again."""


@dataclass(frozen=True, slots=True)
class Band:
    """Some rows of the matrix in the target's format."""

    rows: Rows
    parts: dict[str, Array]
    """By kind, in the shape in which the rows are stored, as unsigned integers; global_scale with the first band."""
    first: dict[str, int]
    """For each part which of its rows is the first."""
    errors: Errors


@dataclass(frozen=True, slots=True)
class Matrix:
    """One stored matrix of a parameter: the only one, or an expert's."""

    parameter: Parameter
    """As the plan stores it; `parameter.source` as it is stored."""
    entry: int
    """Which of the parameter's stored tensors."""

    @property
    def stored(self) -> Parameter:
        """The parameter as it is stored."""
        if self.parameter.source is None:
            raise PlanError(f"{self.parameter.role} isn't converted")
        return self.parameter.source

    @property
    def number(self) -> int:
        """The checkpoint's row of the stored values."""
        return int(self.stored.parts[0].tensors[self.entry])

    @property
    def turned(self) -> bool:
        """Whether rows and columns change places."""
        return self.parameter.dims != self.stored.dims

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns, in the target's order."""
        shape = logical_shape(self.parameter)
        return (shape[0] if shape else 1), math.prod(shape[1:])

    def step(self) -> int:
        """Rows of a band: a fact of the matrix and its codings."""
        source, target = coding(self.stored), coding(self.parameter)
        if self.turned:
            source = replace(source, block=(math.lcm(source.block[1], source.pack), 1))
        return band_rows(source, target, *self.shape)

    def bands(
        self, reader: Reads, checkpoint: Checkpoint, room: int, rows: Rows | None = None,
        tops: Tops | None = None,
    ) -> Iterator[Band]:  # fmt: skip
        """The bands of these rows (of all) in order; they begin at a multiple of `step`.

        A band's arrays hold until the next one is asked for. `tops`: where the largest magnitude of a matrix that is
        done in several goes is kept, if the format needs it.
        """
        source, target, (all_rows, columns) = coding(self.stored), coding(self.parameter), self.shape
        step, (low, high) = self.step(), rows or (0, all_rows)
        windows = _Turned if self.turned else _Straight
        opened = windows(self, source, reader, checkpoint, room, (low, high))
        whole = None
        if target.tensor_scale:  # over all rows, whichever are wanted

            def find() -> float:
                every = windows(self, source, reader, checkpoint, room, (0, all_rows))
                seen = (every.read(first, min(first + step, all_rows)) for first in range(0, all_rows, step))
                return max((top(c, parts, columns) for c, parts in seen), default=0.0)

            whole = of_matrix(find() if rows is None or tops is None else tops.find(self.number, find))
        for first in range(low, high, step):
            last = min(first + step, high)
            window, parts = opened.read(first, last)
            made, errors = recode(window, target, parts, columns, whole, source.powers)
            if first:
                made.pop("global_scale", None)
            shaped = {p.kind: _shaped(made[p.kind], p) for p in self.parameter.parts if p.kind in made}
            place = {"values": first, "scale": first // target.block[0], "global_scale": 0}
            yield Band((first, last), shaped, place, errors)


def coding(parameter: Parameter) -> Coding:
    """How the parameter's matrices are stored. Raises PlanError for what can't be converted."""
    types = {part.kind: part.dtype for part in parameter.parts}
    return Coding(types["values"], types.get("scale"), parameter.block or (1, 1), "global_scale" in types)


def _shaped(array: Array, part: Part) -> Array:
    return array.reshape(-1, *part.shape[1:])


class _Stretches:
    """Rows of the parts of one stored matrix."""

    def __init__(
        self, matrix: Matrix, source: Coding, reader: Reads, checkpoint: Checkpoint, room: int, rows: Rows
    ) -> None:
        self.source, self.reader, self.checkpoint, self.room = source, reader, checkpoint, room
        self.parts = {part.kind: part for part in matrix.stored.parts}
        self.entry = matrix.entry
        self.small: dict[str, Array] = {}
        self.first = 0

    def rows(self, kind: str, first: int, last: int, fetched: bool = False) -> Array:
        """Rows of a part as unsigned integers [rows, elements]; `fetched` ones hold until the next call."""
        part = self.parts[kind]
        number, item = int(part.tensors[self.entry]), DTYPE_BITS[part.dtype] // 8
        row = math.prod(part.shape[1:]) * item
        file = self.checkpoint.files[int(self.checkpoint.file_numbers[number])].name
        start, length = int(self.checkpoint.starts[number]) + first * row, (last - first) * row
        if fetched and length <= self.room:
            data = self.reader.fetch(file, start, length)
        else:
            data = self.reader.read(file, start, np.empty(length, np.uint8).data)
        return np.frombuffer(data, f"<u{item}").reshape(last - first, -1)


class _Straight(_Stretches):
    """Where rows stay rows: scales are read at once, values band by band."""

    def __init__(
        self, matrix: Matrix, source: Coding, reader: Reads, checkpoint: Checkpoint, room: int, rows: Rows
    ) -> None:
        super().__init__(matrix, source, reader, checkpoint, room, rows)
        self.first = rows[0] // source.block[0]
        if source.scale is not None:
            self.small["scale"] = self.rows("scale", self.first, -(-rows[1] // source.block[0]))
        if source.tensor_scale:
            self.small["global_scale"] = self.rows("global_scale", 0, 1).ravel()

    def read(self, first: int, last: int) -> tuple[Coding, dict[str, Array]]:
        """How these rows are stored, and their parts."""
        parts = dict(self.small)
        if "scale" in parts:
            tall = self.source.block[0]
            parts["scale"] = parts["scale"][first // tall - self.first : -(-last // tall) - self.first]
        parts["values"] = self.rows("values", first, last, True)
        return self.source, parts


class _Turned(_Stretches):
    """Where rows become columns: the stored matrix is held, and bands of its columns are decoded."""

    def __init__(
        self, matrix: Matrix, source: Coding, reader: Reads, checkpoint: Checkpoint, room: int, rows: Rows
    ) -> None:
        super().__init__(matrix, source, reader, checkpoint, room, rows)
        for kind, part in self.parts.items():
            self.small[kind] = self.rows(kind, 0, part.shape[0])

    def read(self, first: int, last: int) -> tuple[Coding, dict[str, Array]]:
        """Stored columns `first` to `last` as rows of float32."""
        wide, pack = self.source.block[1], self.source.pack
        parts = {**self.small, "values": self.small["values"][:, first // pack : last // pack]}
        if "scale" in parts:
            parts["scale"] = parts["scale"][:, first // wide : -(-last // wide)]
        x = np.ascontiguousarray(self.source.decode(parts, last - first).T)
        return Coding("F32"), {"values": x.view(np.uint32)}
