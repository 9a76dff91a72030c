"""All legal grids of one question: binding, cluster, workload and the sizes that the user keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shard_plans.errors import EngineRefuses, GridError, PlanError
from shard_plans.families.binding import Binding
from shard_plans.layouts.vllm_rules import engine_reasons
from shard_plans.memory.cluster import Cluster
from shard_plans.memory.engine import load_engine
from shard_plans.memory.payload import Payload
from shard_plans.memory.workload import Workload
from shard_plans.placement.grid import Grid
from shard_plans.search.candidate import Candidate, Known, Outline, Outlines
from shard_plans.search.dealt import Dealer
from shard_plans.search.goals import simplest
from shard_plans.search.grids import legal_grids, refuse


@dataclass(frozen=True, slots=True)
class Space:
    """What is searched."""

    binding: Binding
    payload: Payload
    cluster: Cluster
    workload: Workload
    mtp: str = "keep"
    fixed: Mapping[str, int] = field(default_factory=dict)
    """Sizes that the user gave."""
    wide: bool = False
    """Let tp reach over nodes."""
    dealer: Dealer | None = None
    """Deals experts by load."""
    alone: bool = False
    """Count weights alone."""
    known: Known = field(default_factory=dict, compare=False, repr=False)
    """Bytes by layer that were counted already; they depend on the binding alone."""

    @property
    def room(self) -> int:
        """Bytes that a rank may take."""
        return int(self.cluster.card.memory * self.workload.utilization)

    def imbalance(self, grid: Grid) -> float | None:
        """Tokens of the busiest expert slot over the mean, no expert doubled; None where no load says it."""
        return self.dealer.dealt(grid).imbalance if self.dealer is not None else None

    def grids(self) -> list[Grid]:
        """The legal grids; GridError, with the legal sizes, where there are none.

        Of engines that plans are made for, vLLM can't carry out all; then these are left out.
        """
        found = list(legal_grids(self.binding, self.cluster, self.fixed, self.wide))
        if not found:
            refuse(self.binding, self.cluster, self.fixed)
        return self._runnable(found) if load_engine(self.workload.engine).name == "vllm" else found

    def _runnable(self, grids: list[Grid]) -> list[Grid]:
        """Those that vLLM can carry out. Raises EngineRefuses where it can none."""
        reasons = {grid: engine_reasons(self.binding, grid) for grid in grids}
        found = [grid for grid in grids if not reasons[grid]]
        if not found:
            told = "; ".join(dict.fromkeys(reason for each in reasons.values() for reason in each))
            raise EngineRefuses(f"{self.workload.engine} can't carry out any plan of these sizes: {told}")
        return found

    def outlines(self) -> tuple[Outlines, list[tuple[Grid, Outline]], dict[Grid, PlanError]]:
        """Every grid's bytes by layer, and the grids that cut where nothing may be cut, with the reason."""
        outlines = Outlines(self.binding, self.payload, self.workload, self.mtp, self.alone, self.known)
        found, refused = [], {}
        for grid in self.grids():
            try:
                found.append((grid, outlines.outline(grid)))
            except PlanError as error:  # under strict_blocks some sizes cut inside a block
                refused[grid] = error
        if not found:
            raise next(iter(refused.values()), GridError("no parallel sizes are legal"))
        return outlines, found, refused

    def roomiest(self) -> Candidate:
        """The grid and stages whose fullest rank needs least."""
        outlines, found, _ = self.outlines()
        found.sort(key=lambda item: item[1].least // item[0].pp)
        best: Candidate | None = None
        for grid, outline in found:
            if best is not None and outline.least // grid.pp > best.need:
                break
            candidate = outlines.candidate(grid, outline)
            if best is None or (candidate.need, simplest(grid)) < (best.need, simplest(best.grid)):
                best = candidate
        if best is None:
            raise GridError("no parallel sizes are legal")
        return best

    def fits(self) -> bool:
        """Whether some grid fits; False too where none is legal."""
        try:
            outlines, found, _ = self.outlines()
        except (GridError, PlanError):
            return False
        able = sorted((outline.least // grid.pp, number) for number, (grid, outline) in enumerate(found))
        for least, number in able:
            if least > self.room:
                return False
            if outlines.least(*found[number]) <= self.room and outlines.candidate(*found[number]).need <= self.room:
                return True
        return False

    def together(self) -> int:
        """Bytes that all ranks together need at least, for weights and caches, whichever grid is taken."""
        _, found, _ = self.outlines()
        return min(grid.stage_ranks * outline.least for grid, outline in found)

    def plainest(self) -> Candidate:
        """The grid with the fewest stages, then the fewest replicas: of those that fit, or of all where none does."""
        outlines, found, _ = self.outlines()
        found.sort(key=lambda item: (item[0].pp, item[0].dp, item[0].etp, -item[0].ep))
        for grid, outline in found:
            if outline.least // grid.pp <= self.room:
                candidate = outlines.candidate(grid, outline)
                if candidate.need <= self.room:
                    return candidate
        return outlines.candidate(*found[0])

    def on(self, nodes: int, cards: int | None = None) -> Space:
        """The same question for another number of nodes, or of cards in each."""
        cluster = replace(self.cluster, nodes=nodes, cards=cards or self.cluster.cards)
        dealer = replace(self.dealer, cluster=cluster) if self.dealer is not None else None
        return replace(self, cluster=cluster, dealer=dealer)

    def weights(self) -> Space:
        """The same question for weights alone, on whole cards."""
        return replace(self, alone=True, workload=replace(self.workload, utilization=1.0))

    def stored(self, **weights: str) -> Space:
        """The same question with groups of weights in other formats. Raises PlanError where that isn't possible."""
        payload = Payload(self.binding, self.payload.strict_blocks, {**self.payload.weights, **weights})
        return replace(self, known={}, payload=payload)

    def under(self, **changes: Any) -> Space:
        """The same question for another workload; of a context shorter than the shared prefix all is shared."""
        if "context" in changes:
            changes = {"prefix": min(self.workload.prefix, changes["context"]), **changes}
        return replace(self, workload=replace(self.workload, **changes))

    def smaller(self) -> Iterator[Space]:
        """The same question for ever more of the cluster's cards: within a node, then whole nodes."""
        for cards in range(1, self.cluster.cards + 1):
            yield self.on(1, cards)
        for nodes in range(2, self.cluster.nodes + 1):
            yield self.on(nodes)
