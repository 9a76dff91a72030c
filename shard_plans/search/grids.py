"""The legal parallel sizes of a model on a cluster, and why others aren't."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NoReturn

from shard_plans.errors import GridError
from shard_plans.families.binding import Binding
from shard_plans.memory.cluster import Cluster
from shard_plans.placement.grid import Grid, divisors, make_grid
from shard_plans.placement.place import check_divides, legal_sizes

AXES = ("tp", "pp", "dp", "ep", "etp")


def expert_count(binding: Binding) -> int:
    """Routed experts of a layer that has some; 0 in a dense model."""
    return binding.model.sizes.get("experts", 0) if any(p.per_expert for p in binding.parameters) else 0


def legal_grids(binding: Binding, cluster: Cluster, fixed: Mapping[str, int], wide: bool = False) -> Iterator[Grid]:
    """Legal grids that fill the cluster and keep the sizes given.

    Unless tp is given or `wide` is set, the ranks of a tp group share a node.
    """
    world, experts = cluster.world, expert_count(binding)
    legal_tp, legal_etp = legal_sizes(binding, "tp"), set(legal_sizes(binding, "etp"))
    within = cluster.cards if "tp" not in fixed and not wide else world
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


def refuse(binding: Binding, cluster: Cluster, fixed: Mapping[str, int]) -> NoReturn:
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
        legal = sorted({getattr(grid, axis) for grid in legal_grids(binding, cluster, others)})
        if legal:
            raise GridError(
                f"{told}: no plan of this {binding.family.name} model for {cluster.text} has these sizes; "
                f"legal {axis} with the others: {', '.join(map(str, legal))}"
            )
    every = {axis: sorted({getattr(grid, axis) for grid in legal_grids(binding, cluster, {})}) for axis in AXES}
    legal_text = "; ".join(f"{axis} {', '.join(map(str, sizes))}" for axis, sizes in every.items())
    raise GridError(f"{told or 'no sizes'}: no plan for {cluster.text} has these sizes; legal: {legal_text}")
