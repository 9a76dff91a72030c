"""What the plan converts, made again from the checkpoint and compared with the shards, errors included."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from converter.backward.agreement import misfits
from converter.backward.gather import BLOCK, Array, Held, Shards, overlap, pick, put, whole
from converter.findings import Failure
from converter.forward.manifests import matrix_figures
from converter.output.carry import FAMILY, PLAN
from converter.precision.errors import Errors
from converter.precision.matrix import Band, Matrix, Reads
from converter.streams.reading import Reader
from shard_plans.checkpoints.checkpoint import Checkpoint
from shard_plans.documents.manifest import ROOT
from shard_plans.documents.plan import read_plan
from shard_plans.documents.shard_records import ManifestTensor, Piece
from shard_plans.families.binding import bind
from shard_plans.families.family import read_family
from shard_plans.families.parameter import Parameter, Part
from shard_plans.placement.precision import in_precision
from shard_plans.placement.shards import Source

Kind = tuple[str, tuple[int, ...], int]
"""Type, shape, and how many experts have one."""


@dataclass(frozen=True, slots=True, eq=False)
class Conversions:
    """What an output's plan converts."""

    checkpoint: Checkpoint
    """As the family binds it: rows that the parameters mean."""
    parameters: tuple[Parameter, ...] = ()

    def matrices(self) -> Iterator[Matrix]:
        """Every matrix that is converted."""
        for parameter in self.parameters:
            yield from (Matrix(parameter, entry) for entry in range(len(parameter.parts[0].tensors)))

    def sources(self) -> Iterator[Source]:
        """The parameters as sources of shard tensors."""
        for parameter in self.parameters:
            values = parameter.parts[0]
            experts = tuple(range(len(values.tensors))) if parameter.per_expert else None
            yield Source(values.pattern, experts, (), (), values.tensors, parameter)

    def drawn(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which of the checkpoint's tensors they are made of."""
        found = np.zeros(len(self.checkpoint), np.bool_)
        for parameter in self.parameters:
            for part in parameter.source.parts if parameter.source is not None else ():
                found[self.checkpoint.numbers[part.pattern] if part.stacked else part.tensors] = True
        return found

    def kinds(self) -> dict[str, Kind]:
        """What is made, under the names and patterns that it has in the converted checkpoint."""
        return {
            part.pattern: (
                part.dtype,
                (len(part.tensors), *part.shape) if part.stacked else part.shape,
                len(part.tensors),
            )
            for parameter in self.parameters
            for part in parameter.parts
        }


def conversions(shards: Shards, checkpoint: Checkpoint) -> Conversions:
    """Those of an output. Raises ReshardError where its documents don't describe the checkpoint."""
    if not shards.converted:
        return Conversions(checkpoint)
    plan = read_plan(shards.out / PLAN)
    binding = in_precision(bind(checkpoint, read_family(shards.out / FAMILY)), plan.weights)
    dropped = plan.mtp == "drop"
    kept = (p for p in binding.parameters if p.source is not None and not (p.stage == "mtp" and dropped))
    return Conversions(binding.checkpoint, tuple(kept))


def unmade(piece: Piece, tensor: ManifestTensor, made: Mapping[str, Kind]) -> Iterator[str]:
    """Why a converted piece can't be of what the plan makes."""
    if piece.tensor not in made:
        yield f"claims to hold {piece.tensor} converted, which the plan doesn't make"
        return
    dtype, shape, count = made[piece.tensor]
    if max(piece.experts or (0,)) >= count:
        yield f"claims to hold expert {max(piece.experts or (0,))} of {piece.tensor}, which has {count}"
    yield from misfits(piece, dtype, shape, tensor)


def made_name(part: Part, entry: int) -> str:
    """The name of the tensor that holds the entry: one an expert, or one that stacks all."""
    return part.pattern if part.stacked else part.pattern.replace("{expert}", str(entry))


def recompute(
    matrix: Matrix, shards: Shards, made: Conversions, source: Reads, held: Reader, buffer: Array
) -> Iterator[Failure]:
    """Every difference between a matrix made again and what all ranks hold of it."""
    parts = {part.kind: part for part in matrix.parameter.parts}
    names = {kind: made_name(part, matrix.entry) for kind, part in parts.items()}
    holders = {kind: _of_entry(shards.holders(name, True), parts[kind], matrix) for kind, name in names.items()}
    if not any(holders.values()) and shards.root.partial is not None:
        return
    wrong: set[tuple[str, int]] = set()
    errors = Errors()
    for band in matrix.bands(source, made.checkpoint, BLOCK):
        errors.add(band.errors)
        for kind, array in band.parts.items():
            yield from _compare(shards, names[kind], kind, array, holders[kind], band, matrix, held, buffer, wrong)
    figures = matrix_figures(errors)
    for found in holders["values"]:
        stated = found.piece.converted.errors if found.piece.converted is not None else ()
        if stated and stated[found.position or 0] != figures:
            yield Failure(
                shards.manifests[found.file].file, found.tensor.name,
                f"states for {names['values']} the errors {stated[found.position or 0]}, they are {figures}",
            )  # fmt: skip


def _of_entry(found: list[Held], part: Part, matrix: Matrix) -> list[Held]:
    """Those that hold this expert, where one tensor stacks all of them."""
    if not part.stacked:
        return found
    return [held for held in found if held.piece.cuts[0].runs == ((matrix.entry, matrix.entry + 1),)]


def _compare(
    shards: Shards, name: str, kind: str, array: Array, holders: list[Held], band: Band, matrix: Matrix,
    reader: Reader, buffer: Array, wrong: set[tuple[str, int]],
) -> Iterator[Failure]:  # fmt: skip
    first = band.first[kind]
    block = [(first, first + len(array)), *((0, size) for size in array.shape[1:])]
    if next((p.stacked for p in matrix.parameter.parts if p.kind == kind), False):
        array, block = array[None], [(matrix.entry, matrix.entry + 1), *block]
    covered: np.ndarray[Any, np.dtype[np.bool_]] | None = None
    complete = False
    for who, held in enumerate(holders):
        found = overlap(held, block)
        if found is None:
            continue
        spans, indexes = found
        unequal = shards.read(reader, held, spans, buffer) != pick(array, indexes)
        if unequal.any() and (kind, who) not in wrong:
            wrong.add((kind, who))
            at = [start + int(place) for (start, _), place in zip(spans, np.argwhere(unequal)[0], strict=True)]
            yield Failure(
                shards.manifests[held.file].file, held.tensor.name,
                f"isn't what {name} becomes: {int(np.count_nonzero(unequal))} of {unequal.size} elements compared "
                f"differ, the first at {at} of what it holds",
            )  # fmt: skip
        complete = complete or whole(indexes, array.shape)
        if not complete:
            covered = np.zeros(array.shape, np.bool_) if covered is None else covered
            put(covered, indexes, True)
    if shards.root.partial is None and not complete and (covered is None or not covered.all()):
        missing = array.size - (0 if covered is None else int(np.count_nonzero(covered)))
        yield Failure(ROOT, name, f"{missing} elements from row {first} on are in no shard")
