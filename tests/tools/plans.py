"""Plans made straight from parallel sizes, for tests that don't care for a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from shard_plans.documents.plan import Plan, PlanSource
from shard_plans.families.binding import Binding
from shard_plans.placement.experts import ExpertPlacement, contiguous
from shard_plans.placement.grid import make_grid

DENSE_PLANS: tuple[dict[str, int], ...] = (
    {}, {"tp": 2}, {"tp": 4}, {"tp": 2, "pp": 3}, {"dp": 2, "pp": 3}, {"dp": 2, "tp": 2}, {"pp": 2},
    {"pp": 2, "dp": 2, "tp": 4},
)  # fmt: skip
MOE_PLANS: tuple[dict[str, int], ...] = (
    {"tp": 2, "ep": 2}, {"tp": 4, "ep": 2, "etp": 2}, {"tp": 4, "ep": 2, "etp": 1}, {"dp": 4, "ep": 2, "etp": 1},
    {"dp": 2, "tp": 2, "ep": 4}, {"pp": 2, "dp": 2, "tp": 2, "ep": 4},
)  # fmt: skip


def plan_id(sizes: dict[str, int]) -> str:
    """A short name for a test's parameter."""
    return " ".join(f"{axis}{size}" for axis, size in sizes.items()) or "one rank"


def make_plan(
    binding: Binding, sizes: Mapping[str, int] | None = None, mtp: str = "keep", strict_blocks: bool = False
) -> Plan:
    """Layers dealt evenly over the stages, experts in order."""
    grid = make_grid(**(sizes or {}))
    forward = len(binding.model.forward_layers)
    kept = len(binding.model.layers) if mtp == "keep" else forward
    edges = [round(stage * forward / grid.pp) for stage in range(grid.pp)] + [kept]
    experts = next((len(p.parts[0].tensors) for p in binding.parameters if p.per_expert), 0)
    checkpoint = binding.source
    source = PlanSource(binding.family.name, checkpoint.fingerprint, len(checkpoint), checkpoint.total_bytes)
    placement = ExpertPlacement(contiguous(experts, grid.ep)) if experts else ExpertPlacement()
    return Plan(source, grid, tuple(pairwise(edges)), placement, mtp, strict_blocks)
