"""Where a replay runs: the sizes of the model, the grid, the tape."""

from __future__ import annotations

from dataclasses import dataclass

from shard_plans.families.model import Model
from shard_plans.memory.caches import size
from shard_plans.memory.replay.tape import Tape
from shard_plans.placement.grid import Grid


@dataclass(frozen=True, slots=True)
class Place:
    """One rank."""

    model: Model
    grid: Grid
    tape: Tape

    def size(self, name: str) -> int:
        """A size of the model."""
        return size(self.model, name)

    def share(self, name: str) -> int:
        """The rank's part of a size that tp divides."""
        return size(self.model, name) // self.grid.tp
