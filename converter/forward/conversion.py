"""Units that change precision on their way through a move, the chunks that no unit holds whole, and the errors made."""

from __future__ import annotations

from converter.forward.move import Hands, Move
from converter.forward.recode_units import RecodeUnit
from converter.forward.recoding import recode_unit
from converter.precision.errors import Errors
from converter.streams.hashing import CHUNK, TensorHash
from converter.streams.reading import Reader

Chunk = tuple[int, int, int]
"""Numbers of the file, of the tensor in it and of the chunk."""


def convert_unit(move: Move, hands: Hands, number: int) -> None:
    """Convert a unit, write and hash its stretches."""
    unit = _unit(move, number)
    rooms = hands.staging.shares([part.stop - part.start for part in unit.slices])
    sinks = [move.sink(hands, part, room) for part, room in zip(unit.slices, rooms, strict=True)]
    errors = recode_unit(unit, sinks, move.checkpoint, hands.reader, move.buffer, move.tops)
    digests = b"".join(sink.finish() for sink in sinks)
    hands.held[number] = digests + b"".join(found.pack() for found in errors)
    move.prove(hands)


def _unit(move: Move, number: int) -> RecodeUnit:
    unit = move.units[number]
    if not isinstance(unit, RecodeUnit):
        raise TypeError(f"unit {number} is copied")
    return unit


def shared_chunks(move: Move) -> list[Chunk]:
    """Chunks of converted tensors that lie in several units."""
    found: dict[Chunk, None] = {}
    for unit in move.units:
        if not isinstance(unit, RecodeUnit):
            continue
        for part in unit.slices:
            for first, last in part.pieces():
                if not part.whole_chunk(first, last):
                    found[part.target.file, part.target.index, first // CHUNK] = None
    return list(found)


def hash_chunk(move: Move, reader: Reader, chunk: Chunk) -> None:
    """Hash a chunk that is written, by reading it."""
    file, index, number = chunk
    layout = move.layouts[file]
    tensor = layout.file.tensors[index]
    start = len(layout.header) + layout.offsets[index] + number * CHUNK
    state = TensorHash()
    state.update(reader.fetch(move.partial_name(file), start, min(CHUNK, tensor.nbytes - number * CHUNK)))
    move.keep_chunk(file, index, number, state.chunks())


def matrix_errors(move: Move) -> dict[int, Errors]:
    """The errors of each converted matrix, by the checkpoint's row of its values; rows add up in order."""
    found: dict[int, Errors] = {}
    for number in sorted(move.errors):
        matrices = [matrix for _, _, matrix in _unit(move, number).matrices if matrix is not None]
        for matrix, errors in zip(matrices, move.errors[number], strict=True):
            found.setdefault(matrix.number, Errors()).add(errors)
    return found
