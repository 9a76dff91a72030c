"""Why grids were rejected, gathered by tp and pp."""

from __future__ import annotations

from dataclasses import dataclass

from shard_plans.console import size
from shard_plans.errors import PlanError
from shard_plans.placement.grid import Grid
from shard_plans.placement.place import legal_sizes
from shard_plans.search.candidate import Candidate
from shard_plans.search.found import Rejected
from shard_plans.search.space import Space

Group = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Speed:
    tokens: float
    links: float
    second: str


class Verdicts:
    """What was found out about each grid."""

    def __init__(self, room: int) -> None:
        """`room`: bytes that a rank may take."""
        self.room = room
        self._memory: dict[Grid, int] = {}
        self._cut: dict[Grid, PlanError] = {}
        self._speed: dict[Grid, _Speed] = {}
        self._apart: list[int] = []

    def memory(self, grid: Grid, need: int) -> None:
        """The fullest rank needs at least `need` bytes."""
        self._memory[grid] = need

    def cut(self, grid: Grid, error: PlanError) -> None:
        """A cut isn't possible."""
        self._cut[grid] = error

    def speed(self, grid: Grid, tokens: float, links: float, second: str) -> None:
        """At most `tokens` a second, `links` of a step in communication; memory and cuts weigh more.

        `second` says how it stands by the goal's second measure, which decides between plans that are as fast.
        """
        if grid not in self._memory and grid not in self._cut:
            self._speed[grid] = _Speed(tokens, links, second)

    def apart(self, space: Space) -> None:
        """Sizes of tp that the model allows and the cluster could hold, were it not for the borders of its nodes."""
        if space.wide or "tp" in space.fixed:
            return
        cards, world = space.cluster.cards, space.cluster.world
        self._apart = [tp for tp in legal_sizes(space.binding, "tp") if world % tp == 0 and cards % tp]

    def groups(self, best: Candidate | None) -> tuple[Rejected, ...]:
        """One row for each tp and pp: the weakest reason, which the group's best grid has."""
        found: dict[Group, list[Grid]] = {}
        for grid in (*self._speed, *self._memory, *self._cut):
            found.setdefault((grid.tp, grid.pp), []).append(grid)
        reason = "its groups would reach over nodes; --tp-across-nodes tries it"
        apart = [Rejected(tp, 0, 0, "nodes", reason) for tp in self._apart]
        return (*(self._group(group, grids, best) for group, grids in sorted(found.items())), *apart)

    def _group(self, group: Group, grids: list[Grid], best: Candidate | None) -> Rejected:
        tp, pp = group
        fast = [self._speed[grid] for grid in grids if grid in self._speed]
        needs = [self._memory[grid] for grid in grids if grid in self._memory]
        if fast:
            most = max(fast, key=lambda each: each.tokens)
            beside = ""
            if best is not None and best.prediction is not None:
                beside = f", the best plan {best.prediction.decode_tokens:,.0f}"
                if most.tokens > best.prediction.decode_tokens:
                    beside += f": as good as equal, but {most.second}"
            full = f"; {len(needs)} of them don't fit" if needs else ""
            detail = f"at most {most.tokens:,.0f} tokens/s{beside}; {most.links:.0%} of a step is communication{full}"
            return Rejected(tp, pp, len(grids), "speed", detail)
        if needs:
            detail = f"the fullest rank needs at least {size(min(needs))}, it may take {size(self.room)}"
            return Rejected(tp, pp, len(grids), "memory", detail)
        return Rejected(tp, pp, len(grids), "cut", str(self._cut[grids[0]]))
