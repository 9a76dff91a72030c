"""Memory of the fullest rank against context and concurrency, the plan kept as it is."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shard_plans.documents.plan import Plan
from shard_plans.families.model import Model
from shard_plans.memory.amount import exactly, total
from shard_plans.memory.limits import longest_context
from shard_plans.memory.needs import stage_ranges
from shard_plans.search.longest import LONGEST, most

MOST_SEQUENCES = 1 << 16


@dataclass(frozen=True, slots=True)
class Point:
    """Bytes of the fullest rank at one value, at the three ends of what can't be computed."""

    value: int
    low: int
    typical: int
    high: int


@dataclass(frozen=True, slots=True)
class Curve:
    """One of the workload's numbers, and the memory that it makes."""

    name: str
    """context or concurrency."""
    now: int
    """The plan's own value."""
    edge: int
    """The largest value that fits, at the end of the ranges that the workload assumes; 0 for none."""
    limit: int
    """The largest value that makes sense: the model's longest context."""
    points: tuple[Point, ...]


def curves(model: Model, plan: Plan) -> tuple[Curve, ...]:
    """Both curves of a plan with a ledger and a cluster."""
    longest = min(longest_context(model) or LONGEST, LONGEST)
    return _curve(model, plan, "context", longest), _curve(model, plan, "concurrency", MOST_SEQUENCES)


def _curve(model: Model, plan: Plan, name: str, limit: int) -> Curve:
    now = getattr(plan.workload, name)
    bound = min((row.limit for row in plan.ledger or ()), default=0)
    limit = max(limit, now)
    edge = most(lambda value: _at(model, plan, name, value)[plan.workload.assume] <= bound, limit)
    last = min(limit, 4 * max(edge, now))
    values = sorted({now, last, *([edge] if edge else []), *(1 << power for power in range(last.bit_length()))})
    first = max(1, last >> 12)
    points = []
    for value in values:
        if first <= value <= last:
            found = _at(model, plan, name, value)
            points.append(Point(value, found["low"], found["typical"], found["high"]))
    return Curve(name, now, edge, limit, tuple(points))


def _at(model: Model, plan: Plan, name: str, value: int) -> dict[str, int]:
    """Bytes of the fullest rank, end by end, with one number of the workload changed."""
    load = plan.workload
    if name == "context":
        load = replace(load, context=value, prefix=min(load.prefix, value))
    else:
        load = replace(load, concurrency=value)
    weights: dict[int, int] = {}
    for row in plan.ledger or ():
        weights[row.stage] = max(weights.get(row.stage, 0), row.weights)
    most_bytes = {"low": 0, "typical": 0, "high": 0}
    for stage, layers in enumerate(plan.stages):
        beside = total(stage_ranges(model, plan.grid, load, stage, layers).values()) + exactly(weights[stage])
        for end in most_bytes:
            most_bytes[end] = max(most_bytes[end], beside.at(end))
    return most_bytes
