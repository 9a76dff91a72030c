"""Which rank of a plan a process of vLLM is, and whether the engine is started as the plan says."""

from __future__ import annotations

from dataclasses import dataclass

from shard_plans.documents.plan import Plan
from shard_plans.errors import RuntimeFault
from shard_plans.launch.command import one_replica
from shard_plans.layouts.vllm_rules import expert_reasons
from shard_plans.placement.grid import Coordinate


@dataclass(frozen=True, slots=True)
class Seat:
    """What a process of the engine is started as: sizes, and its place in each."""

    tp: int
    pp: int
    dp: int
    expert_parallel: bool
    tp_rank: int
    pp_rank: int
    dp_rank: int
    layers: tuple[int, int]
    """Half-open range of the layers on its stage."""
    otherwise: tuple[str, ...] = ()
    """Flags in force that place weights otherwise than any plan does."""


def find_rank(plan: Plan, layers: int, seat: Seat) -> Coordinate:
    """The rank of the plan that sits there. `layers`: those that run.

    Raises RuntimeFault where the engine can't carry out the plan, or is started with other sizes.
    """
    if seat.otherwise:
        raise RuntimeFault(f"{' and '.join(seat.otherwise)} place weights otherwise than a plan; start without")
    grid = plan.grid
    alone = one_replica(plan) if seat.dp == 1 or not plan.experts.default else None
    carried_out = alone or plan
    reasons = expert_reasons(carried_out)
    if reasons:
        raise RuntimeFault(f"the plan can't be carried out: {'; '.join(reasons)}; convert with another plan")
    wanted = {
        "--tensor-parallel-size": (grid.tp, seat.tp),
        "--pipeline-parallel-size": (grid.pp, seat.pp),
        "--data-parallel-size": (carried_out.grid.dp, seat.dp if plan.experts.default else carried_out.grid.dp),
    }
    other = [flag for flag, (planned, given) in wanted.items() if planned != given]
    if other:
        planned, given = (" ".join(f"{flag} {wanted[flag][which]}" for flag in other) for which in (0, 1))
        raise RuntimeFault(
            f"the engine was started with {given}, the shards are for {planned}; start it so, or convert with another "
            f"plan"
        )
    dealt = carried_out.grid.ep > 1
    if plan.experts.default and carried_out.grid.stage_ranks > 1 and dealt != seat.expert_parallel:
        raise RuntimeFault(
            f"the plan {'deals whole experts to ranks' if dealt else 'cuts every expert'} (ep {grid.ep}, etp "
            f"{grid.etp}); start the engine {'with' if dealt else 'without'} --enable-expert-parallel, or convert with "
            f"another plan"
        )
    first, stop = plan.stages[seat.pp_rank]
    if (first, min(stop, layers)) != seat.layers:
        counts = ",".join(str(min(stop, layers) - first) for first, stop in plan.stages)
        raise RuntimeFault(
            f"the plan's stage {seat.pp_rank} has layers {first} to {min(stop, layers) - 1}, the engine's has "
            f"{seat.layers[0]} to {seat.layers[1] - 1}; set VLLM_PP_LAYER_PARTITION={counts}"
        )
    dp = 0 if alone is not None else seat.dp_rank
    return next(at for at in grid.coordinates() if (at.stage, at.dp, at.tp) == (seat.pp_rank, dp, seat.tp_rank))
