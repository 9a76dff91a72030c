"""How vLLM deals a stage's experts to its ranks, and what plans it can't carry out therefore."""

from __future__ import annotations

from shard_plans.documents.plan import Plan
from shard_plans.placement.experts import contiguous


def expert_reasons(plan: Plan) -> list[str]:
    """Why vLLM can't place the experts as the plan does, as sentences; empty where it can."""
    if not plan.experts.default:
        return []
    grid, found = plan.grid, []
    stage = grid.stage_ranks
    if grid.ep * grid.etp != stage:
        found.append(
            f"vLLM deals each stage's experts to all {stage} of its ranks once; the plan keeps {grid.edp} copies "
            f"of them (ep {grid.ep} x etp {grid.etp})"
        )
    elif grid.ep > 1 and grid.etp > 1:
        found.append(
            f"vLLM either deals whole experts or cuts each over all ranks of a stage; the plan does both "
            f"(ep {grid.ep}, etp {grid.etp})"
        )
    if grid.ep > 1 and not in_order(plan):
        found.append("vLLM places experts in order and balances them by itself; the plan places them otherwise")
    return found


def in_order(plan: Plan) -> bool:
    """Whether experts lie in order on the ep slots, in every layer."""
    slots = plan.experts.default
    count = 1 + max(max(ids) for ids in slots)
    dealt = contiguous(count, plan.grid.ep)
    return all(each in (dealt, dealt * plan.grid.edp) for each in (slots, *plan.experts.layers.values()))
