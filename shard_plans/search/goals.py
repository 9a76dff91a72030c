"""What the search is for: how plans that fit are put in order."""

from __future__ import annotations

import math

from shard_plans.cost.prediction import Bounds, Prediction
from shard_plans.memory.workload import Workload
from shard_plans.placement.grid import Grid

GOALS = ("throughput", "latency", "context", "fewest-cards")
"""throughput: most decode tokens a second, then most prefill tokens; latency: the shortest decode step, then the first
token soonest; context: the longest context; fewest-cards: the fewest cards of the cluster, then as throughput."""

Order = tuple[int, ...]
"""Less is better."""


def order(goal: str, grid: Grid, times: Bounds | Prediction, workload: Workload) -> Order:
    """Where a plan of these times stands. Of bounds: a lower bound of the order.

    Times within three per cent count as equal, so that the simpler plan is taken where the model can't tell.
    """
    if goal == "latency":
        return (_steps(times.decode_step), _steps(times.first_token), *simplest(grid))
    replicas = min(grid.dp, workload.concurrency)
    return (_steps(times.decode_step), _steps(times.prefill_step / replicas), *simplest(grid))


def simplest(grid: Grid) -> Order:
    """Between equals: fewer stages, whole experts before cut ones, smaller groups."""
    return (grid.pp, grid.etp, grid.tp, grid.dp, grid.ep)


def _steps(seconds: float) -> int:
    return math.floor(math.log(seconds) / math.log(1.03))
