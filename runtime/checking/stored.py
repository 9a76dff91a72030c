"""Weights of the checkpoint as stored, a section at a time: read here and nowhere else, so that no fault of the
converter's own way to move bytes can hide.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from converter.streams.buffers import PAGE, aligned, page_down, page_up
from converter.streams.reading import Reader
from runtime.blocks.weights import LayerWeights, Stored
from runtime.checking.rebuilt import Rebuilt
from runtime.loading.matrices import largest
from runtime.loading.reading import as_stored
from runtime.loading.slabs import Slabs
from shard_plans.errors import CheckpointError
from shard_plans.families.binding import Binding
from shard_plans.families.parameter import Parameter, Part

STEP = 8 << 20
"""Bytes of one read at most."""


@dataclass(frozen=True, slots=True, order=True)
class _Move:
    """Bytes of a stored tensor, and where they go in the section's memory."""

    file: str
    start: int
    size: int
    place: int


class StoredWeights:
    """Reads parameters of a bound checkpoint by their byte ranges; for one thread at a time."""

    def __init__(self, binding: Binding, rebuilt: Rebuilt | None = None) -> None:
        """`rebuilt` reads what isn't stored in the binding's precision."""
        self._rebuilt = rebuilt
        self._checkpoint = binding.checkpoint
        self._reader = Reader(binding.checkpoint.folder, CheckpointError)
        self._room = aligned(STEP + 2 * PAGE)
        self._layers: dict[int | str, list[Parameter]] = {}
        for parameter in binding.parameters:
            place = parameter.stage if parameter.layer is None else parameter.layer
            self._layers.setdefault(place, []).append(parameter)
        self.largest = max((self._size(found) for found in self._layers.values()), default=0)
        """Bytes of the largest section."""
        self.largest_matrix = largest(
            (parameter.role, part.dtype, part.shape, None if parameter.format is None else parameter.format.name)
            for parameter in binding.parameters for part in parameter.parts if part.kind == "values"
        )  # fmt: skip
        """Numbers of the largest matrix, as it is computed with."""
        self._changed = threading.Condition()
        self._slabs = Slabs(2 * self.largest, self._changed)
        self.bytes_read = 0

    def section(self, place: int | str, device: torch.device, roles: Iterable[str] | None = None) -> LayerWeights:
        """Parameters of a layer, or of `first`, `vision` or `last`, by role (`roles`: only these), on `device`."""
        wanted = [p for p in self._layers.get(place, ()) if roles is None or p.role in roles]
        with self._changed:
            memory = self._slabs.take(self._size(wanted), beyond=True)
        assert memory is not None
        moves: list[_Move] = []
        weights: dict[str, Stored] = {}
        at = 0
        for parameter in wanted:
            parts: dict[str, Tensor] = {}
            for part in parameter.parts:
                if self._is_rebuilt(parameter) and self._rebuilt is not None:
                    parts[part.kind] = self._rebuilt.part(part, parameter.per_expert)
                else:
                    parts[part.kind] = self._look(memory, at, part, parameter.per_expert)
                    moves += self._moves(part, at)
                    at += self._room_of(part)
            format = None if parameter.format is None else parameter.format.name
            number = "" if parameter.number is None else f".{parameter.number}"
            role = parameter.role.replace(".", f"{number}.", 1)  # vision.qkv of block 3: vision.3.qkv
            weights[role] = Stored(
                parts["values"], parts.get("scale"), format, parameter.block, parts.get("global_scale")
            )
        self._read(moves, memory)
        return {role: _on(stored, device) for role, stored in weights.items()}

    def _is_rebuilt(self, parameter: Parameter) -> bool:
        return self._rebuilt is not None and parameter.source is not None

    def _room_of(self, part: Part) -> int:
        """Bytes of memory of a part, rounded up so that any type may follow."""
        return -(-sum(int(self._checkpoint.sizes[number]) for number in part.tensors) // 64) * 64

    def _size(self, parameters: Iterable[Parameter]) -> int:
        return sum(self._room_of(part) for p in parameters if not self._is_rebuilt(p) for part in p.parts)

    def _look(self, memory: Tensor, at: int, part: Part, stacked: bool) -> Tensor:
        """The stored tensor that will be at this place, or all experts' stacked along a new first dimension."""
        nbytes = sum(int(self._checkpoint.sizes[number]) for number in part.tensors)
        stacks = (len(part.tensors),) if stacked else ()
        whole = as_stored(memory[at : at + nbytes], part.dtype, (*stacks, *part.shape))
        return whole[tuple(map(slice, (*stacks, *part.used)))]

    def _moves(self, part: Part, at: int) -> Iterator[_Move]:
        checkpoint = self._checkpoint
        for number in part.tensors.tolist():
            size = int(checkpoint.sizes[number])
            name = checkpoint.files[int(checkpoint.file_numbers[number])].name
            yield _Move(name, int(checkpoint.starts[number]), size, at)
            at += size

    def _read(self, moves: Iterable[_Move], memory: Tensor) -> None:
        """Do all moves, in the order of the files; what lies side by side is read together."""
        target, held = memory.numpy(), ("", 0, 0)
        ordered = sorted(moves)
        for move, stop in zip(ordered, _stops(ordered), strict=True):
            done = 0
            while done < move.size:
                at = move.start + done
                if not (held[0] == move.file and held[1] <= at < held[2]):
                    held = self._fill(move.file, at, stop)
                count = min(held[2] - at, move.size - done)
                target[move.place + done : move.place + done + count] = self._room[at - held[1] :][:count]
                done += count
            self.bytes_read += move.size

    def _fill(self, file: str, at: int, stop: int) -> tuple[str, int, int]:
        """Have the file from the page of `at` in the buffer, up to `stop` if it has room: whose bytes it then holds."""
        start = page_down(at)
        stop = min(stop, start + STEP)
        self._reader.into(file, start, stop, self._room.data[: page_up(stop - start)])
        return file, start, stop

    def close(self) -> None:
        """Close every file."""
        self._reader.close()
        self._slabs.close()
        if self._rebuilt is not None:
            self._rebuilt.close()


def _stops(moves: Sequence[_Move]) -> list[int]:
    """Of each move, where in its file the moves end that lie side by side with it."""
    stops: list[int] = []
    for move, after in zip(reversed(moves), [None, *reversed(moves)], strict=False):
        end = move.start + move.size
        beside = after is not None and (after.file, after.start) == (move.file, end)
        stops.append(stops[-1] if beside else end)
    return stops[::-1]


def _on(stored: Stored, device: torch.device) -> Stored:
    """The parameter on another device."""
    return Stored(
        stored.values.to(device), None if stored.scale is None else stored.scale.to(device), stored.format,
        stored.block, None if stored.whole is None else stored.whole.to(device),
    )  # fmt: skip
