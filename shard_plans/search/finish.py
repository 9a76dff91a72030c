"""From a candidate to a plan: experts placed, every rank counted."""

from __future__ import annotations

from dataclasses import replace

from shard_plans.documents.plan import Plan
from shard_plans.documents.plan_check import plan_source
from shard_plans.memory.cluster import Cluster
from shard_plans.memory.count import ledger
from shard_plans.memory.payload import Payload
from shard_plans.memory.workload import Workload
from shard_plans.placement.experts import ExpertPlacement, contiguous
from shard_plans.search.candidate import Candidate
from shard_plans.search.grids import expert_count


def finished(
    payload: Payload,
    chosen: Candidate,
    cluster: Cluster | None,
    workload: Workload,
    mtp: str,
    experts: ExpertPlacement | None = None,
) -> Plan:
    """The plan of a candidate, with its ledger where there is a cluster; experts are dealt in order unless given."""
    count = expert_count(payload.binding)
    if experts is None:
        experts = ExpertPlacement(contiguous(count, chosen.grid.ep)) if count else ExpertPlacement()
    source = plan_source(payload.binding)
    strict = payload.strict_blocks
    plan = Plan(
        source, chosen.grid, chosen.stages, experts, mtp, strict, cluster, workload, weights=payload.weights
    )  # fmt: skip
    rows = ledger(payload, plan)  # without a cluster too, so that cuts that aren't possible are refused here
    return plan if cluster is None else replace(plan, ledger=rows)


def room(plan: Plan) -> int:
    """Bytes that the fullest rank has left."""
    return min((row.headroom for row in plan.ledger or ()), default=0)
