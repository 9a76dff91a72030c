"""Choosing a plan for a cluster: every legal combination of parallel sizes is tried, the roomiest is taken."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

from shard_plans.documents.plan import Plan, Workload
from shard_plans.documents.plan_check import plan_source
from shard_plans.errors import GridError, PlanError
from shard_plans.families.binding import Binding
from shard_plans.families.dims import Share
from shard_plans.memory.cluster import Cluster
from shard_plans.memory.count import ledger
from shard_plans.memory.needs import activations, kv_cache, logits, stage_need
from shard_plans.memory.payload import Payload
from shard_plans.placement.experts import ExpertPlacement, contiguous
from shard_plans.placement.grid import Grid, divisors, make_grid
from shard_plans.placement.place import check_divides, legal_sizes
from shard_plans.search.stages import balance

AXES = ("tp", "pp", "dp", "ep", "etp")


@dataclass(frozen=True, slots=True)
class Candidate:
    """One grid with its stages, and the bytes that its fullest rank needs."""

    grid: Grid
    stages: tuple[tuple[int, int], ...]
    need: int

    @property
    def order(self) -> tuple[int, ...]:
        """Least need first; then fewer stages, whole experts before cut ones, and smaller groups."""
        grid = self.grid
        return (self.need, grid.pp, grid.etp, grid.tp, grid.dp, grid.ep)


def search(
    binding: Binding,
    cluster: Cluster,
    sizes: Mapping[str, int | None] | None = None,
    workload: Workload | None = None,
    mtp: str = "keep",
    strict_blocks: bool = False,
) -> Plan:
    """The plan whose fullest rank has the most room on `cluster`; where none fits, the closest (plan.fits is False).

    `sizes` given by the user (tp, pp, dp, ep, etp) are kept. Without them tp stays within a node. Raises GridError,
    with the legal sizes, where what is given can't be had.
    """
    fixed = {axis: size for axis, size in (sizes or {}).items() if size is not None}
    workload = workload or Workload()
    payload = Payload(binding, strict_blocks)
    grids = list(_grids(binding, cluster, fixed))
    if not grids:
        _refuse(binding, cluster, fixed)
    best: Candidate | None = None
    refused: PlanError | None = None
    for grid in grids:
        if best is not None and _least(payload, grid, workload, mtp) > best.need:
            continue
        try:
            candidate = _candidate(payload, grid, workload, mtp)
        except PlanError as error:  # under strict_blocks some sizes cut inside a block
            refused = error
            continue
        if best is None or candidate.order < best.order:
            best = candidate
    if best is None:
        raise refused or GridError("no parallel sizes are legal")
    return _plan(payload, best, cluster, workload, mtp, strict_blocks)


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
    return _plan(payload, _candidate(payload, grid, workload, mtp), cluster, workload, mtp, strict_blocks)


def _plan(
    payload: Payload, chosen: Candidate, cluster: Cluster | None, workload: Workload, mtp: str, strict_blocks: bool
) -> Plan:
    source, experts = plan_source(payload.binding), _experts(payload.binding)
    placement = ExpertPlacement(contiguous(experts, chosen.grid.ep)) if experts else ExpertPlacement()
    plan = Plan(source, chosen.grid, chosen.stages, placement, mtp, strict_blocks, cluster, workload)
    rows = ledger(payload, plan)  # without a cluster too, so that cuts that aren't possible are refused here
    if cluster is None:
        return plan
    return Plan(source, chosen.grid, chosen.stages, placement, mtp, strict_blocks, cluster, workload, rows)


def _experts(binding: Binding) -> int:
    return binding.model.sizes.get("experts", 0) if any(p.per_expert for p in binding.parameters) else 0


def _costs(payload: Payload, grid: Grid, workload: Workload, mtp: str) -> tuple[list[int], int, int]:
    """Bytes of each layer that runs, on the fullest rank, and what the first and the last stage hold beside."""
    model, tp, etp = payload.binding.model, Share(0, grid.tp), Share(0, grid.etp)
    held = -(-_experts(payload.binding) // grid.ep)
    weights = [payload.layer(each.index, tp) + held * payload.expert(each.index, etp) for each in model.layers]
    forward = len(model.forward_layers)
    costs = [weights[layer.index] + kv_cache(layer, model, grid, workload) for layer in model.forward_layers]
    last = payload.last(tp, grid.pp > 1) + (sum(weights[forward:]) if mtp == "keep" else 0)
    return costs, payload.first(tp), last


def _candidate(payload: Payload, grid: Grid, workload: Workload, mtp: str) -> Candidate:
    """Balanced stages for a grid, and the need of its fullest rank."""
    model = payload.binding.model
    costs, first, last = _costs(payload, grid, workload, mtp)
    peaks = [activations(layer, model, grid, workload) for layer in model.forward_layers]
    stages = balance(costs, grid.pp, first, last + logits(model, grid, workload), peaks)
    need = 0
    for stage, (start, stop) in enumerate(stages):
        held = sum(costs[start:stop]) + (first if stage == 0 else 0) + (last if stage == grid.pp - 1 else 0)
        beside = stage_need(model, grid, workload, stage, (start, stop))
        need = max(need, held + beside.total - beside.kv_cache)  # the costs hold the cache already
    kept = len(model.layers) if mtp == "keep" else len(model.forward_layers)
    return Candidate(grid, (*stages[:-1], (stages[-1][0], kept)), need)


def _least(payload: Payload, grid: Grid, workload: Workload, mtp: str) -> int:
    """A lower bound of what the fullest rank needs, cheap to have: all bytes spread evenly over the stages."""
    try:
        costs, first, last = _costs(payload, grid, workload, mtp)
    except PlanError:
        return 0
    return (sum(costs) + first + last) // grid.pp


def _grids(binding: Binding, cluster: Cluster, fixed: Mapping[str, int]) -> Iterator[Grid]:
    """Legal grids that fill the cluster and keep the sizes given."""
    world, experts = cluster.world, _experts(binding)
    legal_tp, legal_etp = legal_sizes(binding, "tp"), set(legal_sizes(binding, "etp"))
    within = cluster.cards if "tp" not in fixed else world
    for tp in legal_tp:
        if world % tp or within % tp or tp != fixed.get("tp", tp):
            continue
        for pp in range(1, len(binding.model.forward_layers) + 1):
            if (world // tp) % pp or pp != fixed.get("pp", pp):
                continue
            dp = world // tp // pp
            if dp != fixed.get("dp", dp):
                continue
            if not experts:
                etp = fixed.get("etp", dp * tp)  # of no effect, but kept where the user gives it
                if fixed.get("ep", 1) == 1 and etp > 0 and (dp * tp) % etp == 0:
                    yield make_grid(tp, pp, dp, 1, etp)
                continue
            for ep in range(1, min(experts, dp * tp) + 1):
                if (dp * tp) % ep or ep != fixed.get("ep", ep):
                    continue
                for etp in range(1, dp * tp // ep + 1):
                    if (dp * tp // ep) % etp == 0 and etp in legal_etp and etp == fixed.get("etp", etp):
                        yield Grid(tp, pp, dp, ep, etp)


def _refuse(binding: Binding, cluster: Cluster, fixed: Mapping[str, int]) -> NoReturn:
    """Raise GridError: what the model doesn't allow, else what the cluster doesn't, with the legal sizes."""
    told = " ".join(f"{axis} {size}" for axis, size in fixed.items())
    if any(size < 1 for size in fixed.values()):
        raise GridError(f"{told}: parallel sizes start at 1")
    alone = Grid(**{axis: size for axis, size in fixed.items() if axis in ("tp", "pp", "ep", "etp")})
    check_divides(binding, alone)
    product = fixed.get("tp", 1) * fixed.get("pp", 1) * fixed.get("dp", 1)
    if cluster.world % product or (len(fixed.keys() & {"tp", "pp", "dp"}) == 3 and cluster.world != product):
        raise GridError(
            f"{told}: tp x pp x dp must make the {cluster.world} cards of {cluster.text}, whose divisors are "
            f"{divisors(cluster.world)}"
        )
    for axis in fixed:
        others = {other: size for other, size in fixed.items() if other != axis}
        legal = sorted({getattr(grid, axis) for grid in _grids(binding, cluster, others)})
        if legal:
            raise GridError(
                f"{told}: no plan of this {binding.family.name} model for {cluster.text} has these sizes; "
                f"legal {axis} with the others: {', '.join(map(str, legal))}"
            )
    every = {axis: sorted({getattr(grid, axis) for grid in _grids(binding, cluster, {})}) for axis in AXES}
    legal_text = "; ".join(f"{axis} {', '.join(map(str, sizes))}" for axis, sizes in every.items())
    raise GridError(f"{told or 'no sizes'}: no plan for {cluster.text} has these sizes; legal: {legal_text}")
