"""Expert placements for a grid under a load, and how uneven they leave it."""

from __future__ import annotations

from dataclasses import dataclass, field

from shard_plans.memory.cluster import Cluster
from shard_plans.placement.experts import ExpertPlacement, contiguous
from shard_plans.placement.grid import Grid
from shard_plans.search.expert_load import ExpertLoad
from shard_plans.search.place_experts import deal, imbalance

MOST_COPIES = 2
"""Redundant experts a slot that are tried where the user doesn't say how many."""


@dataclass(frozen=True, slots=True)
class Dealt:
    """A placement and what it does to the load."""

    placement: ExpertPlacement
    extra: int
    """Redundant copies in each layer."""
    imbalance: float
    """Load of the busiest slot over the mean, averaged over the layers of the load file."""


@dataclass(frozen=True, slots=True)
class Dealer:
    """Deals the experts of one model under one load; each number of slots is worked out once."""

    experts: int
    load: ExpertLoad
    cluster: Cluster
    redundant: int | None = None
    """Redundant copies in each layer that the user wants; None: those that serve the goal."""
    _known: dict[tuple[int, int, int], Dealt] = field(default_factory=dict)

    def dealt(self, grid: Grid, copies: int = 0) -> Dealt:
        """`copies` redundant experts a slot (or the user's number in all), and as many as make the slots equal.

        No more than there are slots that don't hold an expert yet: none where every slot holds all.
        """
        wanted = copies * grid.ep if self.redundant is None else self.redundant
        extra = wanted + (-(self.experts + wanted)) % grid.ep if wanted else 0
        extra = min(extra, self.experts * (grid.ep - 1))
        nodes = self._nodes(grid)
        key = (grid.ep, extra, nodes)
        if key not in self._known:
            layers = {layer: deal(counts, grid.ep, extra, nodes) for layer, counts in self.load.layers.items()}
            uneven = [imbalance(self.load.layers[layer], slots) for layer, slots in layers.items()]
            placement = ExpertPlacement(contiguous(self.experts, grid.ep), layers)
            self._known[key] = Dealt(placement, extra, sum(uneven) / len(uneven))
        return self._known[key]

    def choices(self, grid: Grid) -> list[Dealt]:
        """Placements with ever more redundant copies."""
        if grid.ep == 1 or self.redundant is not None:
            return [self.dealt(grid)]
        return [self.dealt(grid, copies) for copies in range(MOST_COPIES + 1)]

    def contiguous(self, grid: Grid) -> float:
        """The imbalance that experts dealt in order would have."""
        slots = contiguous(self.experts, grid.ep)
        uneven = [imbalance(counts, slots) for counts in self.load.layers.values()]
        return sum(uneven) / len(uneven)

    def _nodes(self, grid: Grid) -> int:
        """Nodes that the slots of one replica lie on, where they lie evenly; else 1."""
        span, cards = grid.ep * grid.etp, self.cluster.cards
        return span // cards if span > cards and span % cards == 0 and cards % grid.etp == 0 else 1
