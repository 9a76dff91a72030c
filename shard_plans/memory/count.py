"""The ledger of a plan: a row a rank, and the lines of one rank, by layer and operator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from shard_plans.documents.plan import Plan
from shard_plans.families.binding import Binding
from shard_plans.families.dims import Share
from shard_plans.memory.amount import exactly, total
from shard_plans.memory.ledger import LedgerRow
from shard_plans.memory.needs import Item, stage_items, stage_ranges
from shard_plans.memory.payload import Payload, rank_weights
from shard_plans.memory.resident import Resident


def ledger(payload: Payload, plan: Plan) -> tuple[LedgerRow, ...]:
    """One row a rank; the capacity is that of the plan's card (0 without a cluster)."""
    model, grid, load = payload.binding.model, plan.grid, plan.workload
    capacity = plan.cluster.card.memory if plan.cluster is not None else 0
    limit = int(capacity * load.utilization)
    ranges = [stage_ranges(model, grid, load, stage, layers) for stage, layers in enumerate(plan.stages)]
    beside = [total(found.values()) for found in ranges]
    needs = [{name: amount.at(load.assume) for name, amount in found.items()} for found in ranges]
    weights, resident = rank_weights(payload, plan), Resident(payload, plan)
    rows = []
    for at, stored in zip(grid.coordinates(), weights, strict=True):
        held = stored + resident.extra(at)
        sums = beside[at.stage] + exactly(held)
        rows.append(
            LedgerRow(
                at.rank, at.stage, held, **needs[at.stage], total=sums.at(load.assume), low=sums.low,
                typical=sums.typical, high=sums.high, capacity=capacity, limit=limit,
            )
        )  # fmt: skip
    return tuple(rows)


def with_ledger(plan: Plan, binding: Binding) -> Plan:
    """The plan with its ledger computed."""
    return replace(plan, ledger=ledger(Payload(binding, plan.strict_blocks, plan.weights), plan))


def rank_items(payload: Payload, plan: Plan, rank: int) -> tuple[Item, ...]:
    """Everything that one rank needs memory for, weights by layer and role first; its sum is the rank's ledger row."""
    grid, at = plan.grid, plan.grid.coordinate(rank)
    tp, etp, slot = Share(at.tp, grid.tp), Share(at.etp, grid.etp), at.edp * grid.ep + at.ep
    ends = (at.stage == 0, at.stage == grid.pp - 1)
    found: list[Item] = []

    def add(layer: int | None, held: dict[str, int]) -> None:
        found.extend(Item("weights", role, layer, exactly(number)) for role, number in held.items() if number)

    add(None, payload.operators(None, tp, etp, 0, ends))
    for layer in range(*plan.stages[at.stage]):
        slots = plan.experts.slots(layer, grid)
        add(layer, payload.operators(layer, tp, etp, len(slots[slot]) if slots else 0, ends))
    found += Resident(payload, plan).items(at)
    found += stage_items(payload.binding.model, grid, plan.workload, at.stage, plan.stages[at.stage])
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Lines:
    """The fullest rank of a stage, line by line."""

    stage: int
    rank: int
    items: tuple[Item, ...]


def stage_lines(payload: Payload, plan: Plan, by: str) -> tuple[Lines, ...]:
    """The fullest rank of each stage, its items summed by `stage`, `layer` or `operator`."""
    rows = plan.ledger if plan.ledger is not None else ledger(payload, plan)
    fullest: dict[int, LedgerRow] = {}
    for row in rows:
        if row.stage not in fullest or row.total > fullest[row.stage].total:
            fullest[row.stage] = row
    return tuple(
        Lines(stage, row.rank, grouped(rank_items(payload, plan, row.rank), by)) for stage, row in fullest.items()
    )


def grouped(items: Iterable[Item], by: str) -> tuple[Item, ...]:
    """Items summed by component alone (`stage`), in each `layer`, or in each `operator`, in order."""
    sums: dict[tuple[str, str, int | None], Item] = {}
    for item in items:
        operator = item.operator if by == "operator" else ""
        key = (item.component, operator, item.layer if by == "layer" else None)
        known = sums.get(key)
        amount = item.amount if known is None else known.amount + item.amount
        source = item.source if by == "operator" else ""
        sums[key] = Item(item.component, operator, key[2], amount, source)
    return tuple(sums.values())
