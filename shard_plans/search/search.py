"""Choosing a plan for a cluster: every legal combination of parallel sizes is judged, the best is taken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shard_plans.cost.model import CostModel, Times, cost_model
from shard_plans.cost.prediction import Bounds, bounds
from shard_plans.documents.plan import Plan
from shard_plans.documents.plan_check import plan_source
from shard_plans.errors import PlanError
from shard_plans.families.binding import Binding
from shard_plans.memory.cluster import Cluster
from shard_plans.memory.count import ledger
from shard_plans.memory.payload import Payload
from shard_plans.memory.workload import Workload
from shard_plans.placement.experts import ExpertPlacement, contiguous
from shard_plans.placement.grid import Grid
from shard_plans.placement.place import check_divides
from shard_plans.search.candidate import Candidate, Outline, Outlines
from shard_plans.search.found import Alternative, Found, trades
from shard_plans.search.goals import GOALS, order
from shard_plans.search.grids import expert_count
from shard_plans.search.longest import longest_context
from shard_plans.search.rejected import Verdicts
from shard_plans.search.space import Space

MOST_CUT = 400
"""Grids whose stages are cut in one search; the others are judged by their bounds."""
SHOWN = 5
"""Plans that are shown beside the best."""


def explore(
    binding: Binding,
    cluster: Cluster,
    sizes: Mapping[str, int | None] | None = None,
    workload: Workload | None = None,
    mtp: str = "keep",
    strict_blocks: bool = False,
    goal: str = "throughput",
    wide: bool = False,
) -> Found:
    """The best plan on `cluster` for `goal`, and the others; where none fits, the closest (plan.fits is False).

    `sizes` given by the user (tp, pp, dp, ep, etp) are kept. Without them tp stays within a node unless `wide`.
    Raises GridError, with the legal sizes, where what is given can't be had.
    """
    if goal not in GOALS:
        raise PlanError(f"goal {goal!r} is unknown; allowed: {', '.join(GOALS)}")
    fixed = {axis: size for axis, size in (sizes or {}).items() if size is not None}
    payload = Payload(binding, strict_blocks)
    space = Space(binding, payload, cluster, workload or Workload(), mtp, fixed, wide)
    if goal == "fewest-cards" and not fixed:
        space = next((smaller for smaller in space.smaller() if smaller.fits()), space)
    if goal == "context":
        space = longest_context(space)
    return _explore(space, goal, strict_blocks)


def search(
    binding: Binding,
    cluster: Cluster,
    sizes: Mapping[str, int | None] | None = None,
    workload: Workload | None = None,
    mtp: str = "keep",
    strict_blocks: bool = False,
    goal: str = "throughput",
) -> Plan:
    """The plan that explore finds."""
    return explore(binding, cluster, sizes, workload, mtp, strict_blocks, goal).plan


def make_plan(
    binding: Binding,
    grid: Grid,
    mtp: str = "keep",
    strict_blocks: bool = False,
    workload: Workload | None = None,
    cluster: Cluster | None = None,
) -> Plan:
    """A plan for exactly these sizes: stages balanced by bytes, experts dealt in order, a ledger for a cluster."""
    check_divides(binding, grid)
    workload = workload or Workload()
    payload = Payload(binding, strict_blocks)
    outlines = Outlines(binding, payload, workload, mtp)
    candidate = outlines.candidate(grid, outlines.outline(grid))
    return finished(payload, candidate, cluster, workload, mtp, strict_blocks)


def finished(
    payload: Payload, chosen: Candidate, cluster: Cluster | None, workload: Workload, mtp: str, strict_blocks: bool
) -> Plan:
    """The plan of a candidate, with its ledger where there is a cluster."""
    source, experts = plan_source(payload.binding), expert_count(payload.binding)
    placement = ExpertPlacement(contiguous(experts, chosen.grid.ep)) if experts else ExpertPlacement()
    plan = Plan(source, chosen.grid, chosen.stages, placement, mtp, strict_blocks, cluster, workload)
    rows = ledger(payload, plan)  # without a cluster too, so that cuts that aren't possible are refused here
    return plan if cluster is None else replace(plan, ledger=rows)


@dataclass(frozen=True, slots=True)
class _Timed:
    grid: Grid
    outline: Outline
    times: Times
    bounds: Bounds


def _explore(space: Space, goal: str, strict_blocks: bool) -> Found:
    model = cost_model(space.binding, space.cluster)
    outlines, outlined, refused = space.outlines()
    verdicts = Verdicts(space.room)
    for grid, error in refused.items():
        verdicts.cut(grid, error)
    timed = []
    for grid, outline in outlined:
        if outline.least // grid.pp > space.room:
            verdicts.memory(grid, outline.least // grid.pp)
            continue
        times = model.times(grid, space.workload)
        timed.append(_Timed(grid, outline, times, bounds(times, grid)))
    kept = []
    for candidate in _distinct(_cut(space, goal, model, outlines, timed, verdicts)):
        plan = finished(space.payload, candidate, space.cluster, space.workload, space.mtp, strict_blocks)
        if plan.fits:
            kept.append((candidate, plan))
        else:  # an engine makes more of the weights than is stored
            verdicts.memory(candidate.grid, max(row.total for row in plan.ledger or ()))
        if len(kept) > SHOWN:
            break
    grids = len(outlined) + len(refused)
    if not kept:
        closest = finished(space.payload, space.roomiest(), space.cluster, space.workload, space.mtp, strict_blocks)
        return Found(closest, goal, rejected=verdicts.groups(None), grids=grids)
    best, plan = kept[0]
    for other in timed:
        if other.grid != best.grid:
            verdicts.speed(other.grid, space.workload.concurrency / other.bounds.decode_step, other.bounds.links)
    others = tuple(Alternative(other, room(beside), trades(best, other)) for other, beside in kept[1:])
    return Found(plan, goal, best.prediction, others, verdicts.groups(best), assumed(model), (), grids)


def _cut(
    space: Space, goal: str, model: CostModel, outlines: Outlines, timed: list[_Timed], verdicts: Verdicts
) -> list[Candidate]:
    """Those that fit, best first: stages are cut in the order of the bounds, until no bound beats what is shown."""
    timed.sort(key=lambda each: order(goal, each.grid, each.bounds, space.workload))
    fitting: list[tuple[tuple[int, ...], Candidate]] = []
    for number, each in enumerate(timed):
        enough = len({_shape(candidate) for _, candidate in fitting}) > SHOWN or number >= MOST_CUT
        if enough and fitting:
            ranked = sorted({_shape(c): o for o, c in reversed(fitting)}.values())
            if order(goal, each.grid, each.bounds, space.workload) > ranked[min(SHOWN, len(ranked) - 1)]:
                break
        try:
            candidate = outlines.candidate(each.grid, each.outline, model, each.times, space.room)
        except PlanError as error:
            verdicts.cut(each.grid, error)
            continue
        if candidate.need > space.room:
            verdicts.memory(each.grid, candidate.need)
        elif candidate.prediction is not None:
            fitting.append((order(goal, each.grid, candidate.prediction, space.workload), candidate))
            fitting.sort(key=lambda item: item[0])
    return [candidate for _, candidate in fitting]


def room(plan: Plan) -> int:
    """Bytes that the fullest rank has left."""
    return min((row.headroom for row in plan.ledger or ()), default=0)


def _shape(candidate: Candidate) -> tuple[int, int, int]:
    return candidate.grid.tp, candidate.grid.pp, candidate.grid.dp


def _distinct(kept: list[Candidate]) -> list[Candidate]:
    """The best of each (tp, pp, dp) first, then the others: plans that differ in ep and etp alone say little."""
    seen: dict[tuple[int, int, int], Candidate] = {}
    for candidate in kept:
        seen.setdefault(_shape(candidate), candidate)
    first = list(seen.values())
    return first + [candidate for candidate in kept if candidate not in first]


def assumed(model: CostModel) -> tuple[str, ...]:
    """The assumptions, and the figures of the card with their sources."""
    card, network = model.card, model.network
    rates = ", ".join(f"{name} {rate / 1e12:g} TFLOPS" for name, rate in card.flops.items())
    inside, between = network.inside, network.between
    figures = (
        f"Card {card.name}: {(card.bandwidth or 0) / 1e9:g} GB/s of memory, {rates}; inside a node {inside.name} "
        f"{inside.bandwidth / 1e9:g} GB/s and {inside.latency * 1e6:g} us a step, between nodes {between.name} "
        f"{between.bandwidth / 1e9:g} GB/s and {between.latency * 1e6:g} us (one direction, a card)."
    )
    sources = "; ".join(f"{figure}: {source}" for figure, source in card.sources.items())
    return (*model.assumptions.sentences(), figures, f"Sources: {sources}.")
