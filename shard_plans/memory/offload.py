"""Cold experts kept in host memory: how many each card must push out so that the rest fits, and what that takes."""

from __future__ import annotations

from dataclasses import dataclass

from shard_plans.documents.plan import Plan
from shard_plans.families.dims import Share
from shard_plans.families.model import experts_a_token
from shard_plans.memory.count import ledger
from shard_plans.memory.ledger import LedgerRow
from shard_plans.memory.payload import Payload


@dataclass(frozen=True, slots=True)
class RankOffload:
    """What one card must push out."""

    rank: int
    experts: int
    """Experts, counted in each layer, that go to host memory."""
    held: int
    """Experts that the rank would hold, counted in each layer."""
    bytes: int
    """Of the experts that go; 0 where all fits."""
    staging: int
    """Bytes kept free on the card for experts that are brought back for a token."""
    lacking: int
    """Bytes still too much when every expert is gone; 0 where offloading is enough."""


@dataclass(frozen=True, slots=True)
class Offload:
    """What a plan must push out."""

    ranks: tuple[RankOffload, ...]
    """Those that must push out any."""
    worst: RankOffload
    """The one that pushes out the most."""
    node_bytes: int
    """Host memory that the fullest node needs for the experts of its cards."""

    @property
    def enough(self) -> bool:
        """Whether the plan fits once they are gone."""
        return not any(rank.lacking for rank in self.ranks)


def offload(payload: Payload, plan: Plan) -> Offload | None:
    """The experts that each card must keep in host memory so that the plan fits; None where it fits, or has no experts.

    The experts of the layers whose experts are largest go first. A card that pushes any out keeps room for the topk
    largest, which are brought back while a layer runs. The plan must name a cluster.
    """
    if plan.cluster is None or not payload.binding.model.sizes.get("experts"):
        return None
    rows = plan.ledger if plan.ledger is not None else ledger(payload, plan)
    known: dict[tuple[int, int, int, int, int], RankOffload] = {}
    found = []
    for row in rows:
        at = plan.grid.coordinate(row.rank)
        key = (at.stage, row.total, at.edp, at.ep, at.etp)
        if key not in known:
            known[key] = _rank(payload, plan, row)
        each = known[key]
        if each.experts or each.lacking:
            found.append(RankOffload(row.rank, each.experts, each.held, each.bytes, each.staging, each.lacking))
    if not found:
        return None
    nodes: dict[int, int] = {}
    for each in found:
        node = each.rank // plan.cluster.cards
        nodes[node] = nodes.get(node, 0) + each.bytes
    worst = max(found, key=lambda each: (each.lacking, each.bytes))
    return Offload(tuple(found), worst, max(nodes.values()))


def _rank(payload: Payload, plan: Plan, row: LedgerRow) -> RankOffload:
    """The fewest experts whose bytes, with room to bring topk back, make the rank fit."""
    grid, at = plan.grid, plan.grid.coordinate(row.rank)
    etp, slot = Share(at.etp, grid.etp), at.edp * grid.ep + at.ep
    sizes: list[int] = []
    for layer in range(*plan.stages[at.stage]):
        each = payload.expert(layer, etp)
        if each:
            sizes += [each] * len(plan.experts.slots(layer, grid)[slot])
    over = -row.headroom
    if over <= 0 or not sizes:
        return RankOffload(row.rank, 0, len(sizes), 0, 0, max(0, over))
    sizes.sort(reverse=True)
    staging = min(experts_a_token(payload.binding.model), len(sizes)) * sizes[0]
    gone = count = 0
    while gone < over + staging and count < len(sizes):
        gone, count = gone + sizes[count], count + 1
    return RankOffload(row.rank, count, len(sizes), gone, staging, max(0, over + staging - gone))
