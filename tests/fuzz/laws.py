"""What must hold of whatever isn't refused, and of the words by which the rest is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from converter.check import check
from converter.restore import restore
from shard_plans.documents.plan import Plan
from shard_plans.errors import ReshardError
from shard_plans.families.binding import Binding
from shard_plans.placement.place import place
from shard_plans.placement.shards import Cut, Placement
from tests.fuzz.guard import Fault
from tests.tools.converted import contents, converted

LONGEST = 3000
"""Characters of a message; it quotes what it is about, but not all of it."""


def sentence(error: ReshardError) -> None:
    """Raise Fault unless the message is one line of printable words."""
    words = str(error)
    if not words or len(words) > LONGEST or not words.isprintable():
        raise Fault(f"is refused by no sentence: {ascii(words)[:300]} ({len(words)} characters)") from error
    if error.exit_code not in (1, 2):
        raise Fault(f"ends with the exit code {error.exit_code}")


def lost(binding: Binding, placement: Placement) -> list[str]:
    """Stored tensors of which some element is on no rank, in no constant and on no skip list."""
    shapes = binding.checkpoint.shapes
    held = [np.zeros(shape, np.bool_) for shape in shapes]
    for tensor in (tensor for file in placement.files for tensor in file.tensors):
        for source in tensor.sources:
            for number in source.tensors.tolist():
                if held[number].size:
                    held[number][indexes(source.cuts)] = True
    for constant in placement.constants:
        for number in constant.tensors.tolist():
            held[number][tuple(slice(*span) for span in constant.region)] = True
    first = len(binding.checkpoint)  # behind the tensors themselves: slices of those that stack experts
    for tensor_number, count in binding.checkpoint.stacks:
        held[tensor_number] = np.stack(held[first : first + count]) if count else held[tensor_number]
        first += count
    held = held[: len(binding.checkpoint)]
    nowhere = [number for number, array in enumerate(held) if array.size and not array.any()]
    partly = [number for number, array in enumerate(held) if array.any() and not array.all()]
    skipped = sum(item.count for item in placement.skipped)
    return [binding.checkpoint.names[number] for number in (*partly, *(nowhere if len(nowhere) > skipped else ()))]


def indexes(cuts: Sequence[Cut]) -> Any:
    """Cuts as an index of a stored array, said in the plainest way."""
    if not cuts:
        return ()
    return np.ix_(*([p // cut.repeat for start, stop in cut.runs for p in range(start, stop)] for cut in cuts))


def laid_out(binding: Binding, plan: Plan) -> Placement:
    """The placement, which must hold everything."""
    placement = place(binding, plan)
    names = lost(binding, placement)
    if names:
        raise Fault(f"loses {len(names)} tensors or parts of them, the first {names[0]}")
    return placement


def comes_back(source: Path, room: Path, plan: Plan, binding: Binding) -> None:
    """Convert, check and restore: the same files must come back."""
    from converter.convert import convert

    convert(binding.checkpoint, binding, plan, place(binding, plan), room / "out", 1)
    result = check(room / "out", source, 1)
    if not result.passed:
        raise Fault(f"is converted, but fails its check: {result.failures[:3]}")
    restore(room / "out", room / "back", 1)
    if weights(room / "back") != weights(source):
        raise Fault("is converted, but isn't restored as it was")


def weights(folder: Path) -> dict[str, bytes]:
    """The weight files and the config of a checkpoint."""
    return {name: data for name, data in contents(folder).items() if name.startswith(("model", "config.json"))}


__all__ = ["comes_back", "converted", "indexes", "laid_out", "lost", "sentence", "weights"]
