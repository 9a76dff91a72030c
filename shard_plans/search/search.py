"""Choosing a plan for a cluster: every legal combination of parallel sizes is judged, the best is taken."""

from __future__ import annotations

from collections.abc import Mapping

from shard_plans.cost.model import cost_model
from shard_plans.cost.prediction import predict
from shard_plans.documents.plan import Plan
from shard_plans.errors import PlanError
from shard_plans.families.binding import Binding
from shard_plans.layouts.loaders import find_loaders
from shard_plans.memory.cluster import Cluster
from shard_plans.memory.payload import Payload
from shard_plans.memory.workload import Workload
from shard_plans.placement.grid import Grid
from shard_plans.placement.place import check_divides
from shard_plans.placement.precision import in_precision
from shard_plans.search.candidate import Outlines
from shard_plans.search.dealt import Dealer
from shard_plans.search.expert_load import ExpertLoad
from shard_plans.search.finish import finished
from shard_plans.search.found import Found
from shard_plans.search.goals import GOALS
from shard_plans.search.grids import expert_count
from shard_plans.search.judge import assumed, judge
from shard_plans.search.longest import longest_context
from shard_plans.search.space import Space


def explore(
    binding: Binding,
    cluster: Cluster,
    sizes: Mapping[str, int | None] | None = None,
    workload: Workload | None = None,
    mtp: str = "keep",
    strict_blocks: bool = False,
    goal: str = "throughput",
    wide: bool = False,
    expert_load: ExpertLoad | None = None,
    redundant: int | None = None,
    advise: bool = True,
    weights: Mapping[str, str] | None = None,
) -> Found:
    """The best plan on `cluster` for `goal`, and the others; where none fits, the closest (plan.fits is False).

    `sizes` given by the user (tp, pp, dp, ep, etp) are kept. Without them tp stays within a node unless `wide`.
    Experts are dealt in order, or by `expert_load` with `redundant` copies in each layer (None: as many as serve the
    goal). `advise` looks for what would fit where nothing does. Raises GridError, with the legal sizes, where what is
    given can't be had.
    """
    if goal not in GOALS:
        raise PlanError(f"goal {goal!r} is unknown; allowed: {', '.join(GOALS)}")
    if redundant is not None and expert_load is None:
        raise PlanError(f"{redundant} redundant experts: which are hot only a load file (--expert-load) says")
    fixed = {axis: size for axis, size in (sizes or {}).items() if size is not None}
    experts = expert_count(binding)
    if redundant is not None and not 0 <= redundant <= 8 * experts:
        raise PlanError(f"{redundant} redundant experts; 0 to {8 * experts}, eight times the model's, are possible")
    dealer = Dealer(experts, expert_load, cluster, redundant) if expert_load is not None else None
    payload = Payload(binding, strict_blocks, weights)
    space = Space(payload.binding, payload, cluster, workload or Workload(), mtp, fixed, wide, dealer)
    if goal == "fewest-cards":
        space = next((smaller for smaller in space.smaller() if smaller.fits()), space)
    if goal == "context":
        space = longest_context(space)
    return judge(space, goal, advise)


def search(
    binding: Binding,
    cluster: Cluster,
    sizes: Mapping[str, int | None] | None = None,
    workload: Workload | None = None,
    mtp: str = "keep",
    strict_blocks: bool = False,
    goal: str = "throughput",
    weights: Mapping[str, str] | None = None,
) -> Plan:
    """The plan that explore finds."""
    return explore(binding, cluster, sizes, workload, mtp, strict_blocks, goal, advise=False, weights=weights).plan


def make_plan(
    binding: Binding,
    grid: Grid,
    mtp: str = "keep",
    strict_blocks: bool = False,
    workload: Workload | None = None,
    cluster: Cluster | None = None,
    weights: Mapping[str, str] | None = None,
) -> Plan:
    """A plan for exactly these sizes: stages balanced by bytes, experts dealt in order, a ledger for a cluster."""
    check_divides(binding, grid)
    workload = workload or Workload()
    payload = Payload(binding, strict_blocks, weights)
    outlines = Outlines(payload.binding, payload, workload, mtp)
    return finished(payload, outlines.candidate(grid, outlines.outline(grid)), cluster, workload, mtp)


def appraise(binding: Binding, plan: Plan) -> Found:
    """What is predicted of a plan that was given, with its ledger; nothing is searched."""
    loaders = find_loaders(binding, plan)
    if plan.cluster is None:
        return Found(plan, "given", loaders=loaders)
    model = cost_model(in_precision(binding, plan.weights), plan.cluster)
    run = len(binding.model.forward_layers)
    stages = tuple((first, min(stop, run)) for first, stop in plan.stages)
    times = model.times(plan.grid, plan.workload)
    prediction = predict(model, times, plan.grid, stages, plan.workload)
    return Found(plan, "given", prediction, assumptions=assumed(model), loaders=loaders)
