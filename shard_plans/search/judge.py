"""Judging every grid of a space: by bounds first, by cut stages in the order of the bounds, the best ones in full."""

from __future__ import annotations

from dataclasses import dataclass

from shard_plans.cost.model import CostModel, Times, cost_model
from shard_plans.cost.prediction import Bounds, bounds
from shard_plans.documents.plan import Plan
from shard_plans.errors import PlanError
from shard_plans.placement.grid import Grid
from shard_plans.search.candidate import Candidate, Outline, Outlines
from shard_plans.search.dealt import Dealt
from shard_plans.search.finish import finished, room
from shard_plans.search.found import Alternative, Found, trades
from shard_plans.search.goals import Order, behind, best_of, order
from shard_plans.search.rejected import Verdicts
from shard_plans.search.remedies import remedies
from shard_plans.search.space import Space

MOST_CUT = 400
"""Grids whose stages are cut in one search; the others are judged by their bounds."""
SHOWN = 5
"""Plans that are shown beside the best."""


@dataclass(frozen=True, slots=True)
class _Timed:
    grid: Grid
    outline: Outline
    times: Times
    bounds: Bounds


@dataclass(frozen=True, slots=True)
class _Kept:
    candidate: Candidate
    plan: Plan
    dealt: Dealt | None


def judge(space: Space, goal: str, advise: bool = True) -> Found:
    """The best plan for the goal, and the others; where none fits, the closest, and with `advise` what would fit."""
    model = cost_model(space.payload.binding, space.cluster)
    outlines, outlined, refused = space.outlines()
    verdicts = Verdicts(space.room)
    for grid, error in refused.items():
        verdicts.cut(grid, error)
    timed = []
    for grid, outline in outlined:
        least = outline.least // grid.pp
        if least > space.room or (least := outlines.least(grid, outline)) > space.room:
            verdicts.memory(grid, least)
            continue
        times = model.times(grid, space.workload, space.imbalance(grid))
        timed.append(_Timed(grid, outline, times, bounds(times, grid)))
    kept = []
    cut = _distinct(_cut(space, goal, model, outlines, timed, verdicts))
    for candidate in cut:
        found = _finished(space, goal, model, outlines, candidate)
        if found.plan.fits:
            kept.append(found)
        else:  # an engine makes more of the weights than is stored
            verdicts.memory(candidate.grid, max(row.total for row in found.plan.ledger or ()))
        if len(kept) > SHOWN:
            break
    verdicts.apart(space)
    grids = len(outlined) + len(refused)
    if not kept:
        closest = finished(space.payload, space.roomiest(), space.cluster, space.workload, space.mtp)
        would = remedies(space, closest, lambda changed: fastest(changed, goal)) if advise else ()
        return Found(closest, goal, rejected=verdicts.groups(None), remedies=would, grids=grids)
    kept.sort(key=lambda each: _order(space, goal, each.candidate))
    chosen = best_of([each.candidate for each in kept], goal, space.workload)
    best = next(each for each in kept if each.candidate is chosen)
    known = {candidate.grid: candidate.prediction for candidate in cut}
    for other in timed:
        if other.grid != best.candidate.grid:
            stand = known.get(other.grid) or other.bounds
            tokens = space.workload.concurrency / stand.decode_step
            second = behind(goal, (other.grid, stand), best.candidate, space.workload)
            verdicts.speed(other.grid, tokens, other.bounds.links, second)
    others = tuple(
        Alternative(other.candidate, room(other.plan), trades(best.candidate, other.candidate))
        for other in kept
        if other is not best
    )
    return Found(
        best.plan, goal, best.candidate.prediction, others, verdicts.groups(best.candidate), assumed(model), (), grids,
        best.dealt,
    )  # fmt: skip


def fastest(space: Space, goal: str) -> Candidate:
    """The best candidate for the goal, unfinished; where none fits, the roomiest."""
    model = cost_model(space.payload.binding, space.cluster)
    outlines, outlined, _ = space.outlines()
    timed = []
    for grid, outline in outlined:
        if outline.least // grid.pp <= space.room:
            times = model.times(grid, space.workload, space.imbalance(grid))
            timed.append(_Timed(grid, outline, times, bounds(times, grid)))
    found = _cut(space, goal, model, outlines, timed, Verdicts(space.room))
    return best_of(_distinct(found)[: SHOWN + 1], goal, space.workload) if found else space.roomiest()


def _cut(
    space: Space, goal: str, model: CostModel, outlines: Outlines, timed: list[_Timed], verdicts: Verdicts
) -> list[Candidate]:
    """Those that fit, best first: stages are cut in the order of the bounds, until no bound beats what is shown."""
    timed.sort(key=lambda each: order(goal, each.grid, each.bounds, space.workload))
    fitting: list[tuple[Order, Candidate]] = []
    for number, each in enumerate(timed):
        ranked = sorted({_shape(candidate): found for found, candidate in reversed(fitting)}.values())
        if ranked and (len(ranked) > SHOWN or number >= MOST_CUT):
            last = ranked[min(SHOWN, len(ranked) - 1)]
            if number >= MOST_CUT or order(goal, each.grid, each.bounds, space.workload) > last:
                break
        try:
            candidate = outlines.candidate(each.grid, each.outline, model, each.times, space.room)
        except PlanError as error:
            verdicts.cut(each.grid, error)
            continue
        if candidate.need > space.room:
            verdicts.memory(each.grid, candidate.need)
        elif candidate.prediction is not None:
            fitting.append((_order(space, goal, candidate), candidate))
            fitting.sort(key=lambda item: item[0])
    return [candidate for _, candidate in fitting]


def _finished(space: Space, goal: str, model: CostModel, outlines: Outlines, candidate: Candidate) -> _Kept:
    """The plan of a candidate; under a load with the redundant experts that serve the goal best and fit."""
    if space.dealer is None:
        return _Kept(candidate, finished(space.payload, candidate, space.cluster, space.workload, space.mtp), None)
    found = []
    for dealt in space.dealer.choices(candidate.grid):
        times = model.times(candidate.grid, space.workload, dealt.imbalance)
        again = outlines.candidate(candidate.grid, outlines.outline(candidate.grid), model, times, space.room)
        plan = finished(space.payload, again, space.cluster, space.workload, space.mtp, dealt.placement)
        found.append(_Kept(again, plan, dealt))
    return min(found, key=lambda each: (not each.plan.fits, _order(space, goal, each.candidate)))


def _order(space: Space, goal: str, candidate: Candidate) -> Order:
    if candidate.prediction is None:
        raise ValueError("a candidate without a prediction has no order")
    return order(goal, candidate.grid, candidate.prediction, space.workload)


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
    card, inside, between = model.card, model.network.inside, model.network.between
    rates = ", ".join(f"{name} {rate / 1e12:g} TFLOPS" for name, rate in card.flops.items())
    figures = (
        f"Card {card.name}: {(card.bandwidth or 0) / 1e9:g} GB/s of memory, {rates}; inside a node {inside.name} "
        f"{inside.bandwidth / 1e9:g} GB/s and {inside.latency * 1e6:g} us a step, between nodes {between.name} "
        f"{between.bandwidth / 1e9:g} GB/s and {between.latency * 1e6:g} us (one direction, a card)."
    )
    sources = "; ".join(f"{figure}: {source}" for figure, source in card.sources.items())
    return (*model.assumptions.sentences(), figures, f"Sources: {sources}.")
