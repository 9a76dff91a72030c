"""What the search is for: how plans that fit are put in order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shard_plans.cost.prediction import Bounds, Prediction
from shard_plans.memory.workload import Workload
from shard_plans.placement.grid import Grid

if TYPE_CHECKING:
    from shard_plans.search.candidate import Candidate

GOALS = ("throughput", "latency", "context", "fewest-cards")
"""throughput: most decode tokens a second, then most prefill tokens; latency: the shortest decode step, then the first
token soonest; context: the longest context; fewest-cards: the fewest cards of the cluster, then as throughput."""

EQUAL = 1.03
"""Times of plans that differ by less than this factor count as equal."""
Order = tuple[int, ...]
"""Less is better."""


def measures(goal: str, grid: Grid, times: Bounds | Prediction, workload: Workload) -> tuple[float, float]:
    """What the goal goes by, the first before the second, in seconds; less is better."""
    if goal == "latency":
        return times.decode_step, times.first_token
    return times.decode_step, times.prefill_step / min(grid.dp, workload.concurrency)


def order(goal: str, grid: Grid, times: Bounds | Prediction, workload: Workload) -> Order:
    """Where a plan of these times stands, in steps of EQUAL. Of bounds: a lower bound of the order."""
    first, second = measures(goal, grid, times, workload)
    return (_steps(first), _steps(second), *simplest(grid))


def best_of(candidates: Sequence[Candidate], goal: str, workload: Workload) -> Candidate:
    """The best of some with predictions.

    Times within three per cent of the least count as equal, so that the simpler plan is taken where the model can't
    tell, and one that is much better by the second measure isn't lost for a hair's breadth in the first.
    """
    left = [(measures(goal, each.grid, each.prediction, workload), each) for each in candidates if each.prediction]
    for at in range(2):
        least = min(times[at] for times, _ in left)
        left = [(times, each) for times, each in left if times[at] <= least * EQUAL]
    return min((each for _, each in left), key=lambda each: simplest(each.grid))


def behind(goal: str, other: tuple[Grid, Bounds | Prediction], best: Candidate, workload: Workload) -> str:
    """How another plan, as fast by the first measure, stands behind the best by the second; else by simplicity."""
    if best.prediction is None:
        raise ValueError("the best plan has a prediction")
    ours, theirs = measures(goal, best.grid, best.prediction, workload)[1], measures(goal, *other, workload)[1]
    if theirs <= ours:
        return "it is less simple"
    what = "the first token" if goal == "latency" else "prefill"
    return f"{what} takes {theirs / ours - 1:.0%} longer"


def simplest(grid: Grid) -> Order:
    """Between equals: fewer stages, whole experts before cut ones, smaller groups."""
    return (grid.pp, grid.etp, grid.tp, grid.dp, grid.ep)


def _steps(seconds: float) -> int:
    return math.floor(math.log(seconds) / math.log(EQUAL))
