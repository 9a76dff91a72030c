"""Where a block runs: the rank's place, its links, the model and the arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from runtime.alive.pulse import Pulse
from runtime.comm.comm import Comm, NoComm
from shard_plans.errors import RuntimeFault
from shard_plans.families.model import Model
from shard_plans.placement.experts import ExpertPlacement, contiguous
from shard_plans.placement.grid import Coordinate, Grid


class ExpertSlots(Protocol):
    """Which experts each slot of a stage holds; shard_plans.experts.ExpertPlacement is one."""

    def slots(self, layer: int, grid: Grid) -> tuple[tuple[int, ...], ...]:
        """Ordered expert ids, indexed [edp * grid.ep + ep]."""


@dataclass(frozen=True, slots=True)
class RankContext:
    """Everything but weights and tokens that a rank's forward pass needs."""

    grid: Grid
    at: Coordinate
    comm: Comm
    model: Model
    experts: ExpertSlots
    compute: torch.dtype
    """float32, float64, bfloat16 or float16."""
    device: torch.device
    deals_images: bool = False
    """Whether each tp rank looks at some of the images, instead of all at all (runtime/blocks/dealt_images.py)."""
    pulse: Pulse = field(default_factory=Pulse)
    """Told of every operator: blocks hand their products to `pulse.saw`."""

    def size(self, name: str) -> int:
        """A named size of the family table; RuntimeFault where the table doesn't give it."""
        size = self.model.sizes.get(name)
        if size is None:
            raise RuntimeFault(
                f"the family table {self.model.family} gives no size {name}, which a block needs; "
                f"it gives {', '.join(sorted(self.model.sizes))}"
            )
        return size

    def share(self, name: str) -> int:
        """This rank's part of a size that tp divides; RuntimeFault where it doesn't divide."""
        size = self.size(name)
        if size % self.grid.tp:
            raise RuntimeFault(f"{name} {size} can't be dealt to tp {self.grid.tp} ranks")
        return size // self.grid.tp

    def reduce_tp(self, x: Tensor) -> Tensor:
        """The sum of a row-parallel product over this replica's tp ranks."""
        return x if self.grid.tp == 1 else self.comm.all_reduce(x, self.grid.tp_group(self.at))

    def accumulate(self) -> torch.dtype:
        """The dtype of norms, router scores and softmax: float32, or the compute dtype if it is wider."""
        return torch.promote_types(self.compute, torch.float32)


def single_rank(model: Model, compute: torch.dtype, device: torch.device) -> RankContext:
    """One rank that holds everything: the context of the unsharded reference."""
    grid = Grid()
    experts = ExpertPlacement(contiguous(model.sizes.get("experts", 0), 1))
    return RankContext(grid, grid.coordinate(0), NoComm(), model, experts, compute, device)
