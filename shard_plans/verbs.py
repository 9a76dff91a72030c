"""The verbs of this package as functions: plan_memory, inspect, and the opening that the others share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from shard_plans.checkpoints.config_file import config_alone, read_config
from shard_plans.documents.plan import Plan, read_plan
from shard_plans.documents.plan_check import check_held, check_plan
from shard_plans.documents.stored import kept_family, open_stored
from shard_plans.errors import PlanError
from shard_plans.families.agreement import disagreements
from shard_plans.families.binding import Binding, bind
from shard_plans.families.config_binding import bind_config
from shard_plans.families.family import load_family, read_family
from shard_plans.families.weights import check_weights, parse_weights
from shard_plans.inspect import Inspection
from shard_plans.inspect import inspect as inspect_path
from shard_plans.layouts.loaders import find_loaders
from shard_plans.memory.cluster import parse_cluster
from shard_plans.memory.count import Lines, stage_lines, with_ledger
from shard_plans.memory.limits import make_workload
from shard_plans.memory.payload import Payload
from shard_plans.placement.place import place
from shard_plans.search.expert_load import read_load
from shard_plans.search.found import Found
from shard_plans.search.search import explore

AnyPath = str | PathLike[str]
Weights = str | Sequence[str] | Mapping[str, str]


def as_weights(given: Weights) -> dict[str, str]:
    """Group -> format, from `--weights` as a user writes it (`experts=fp8_block`), once or several times."""
    if isinstance(given, Mapping):
        return check_weights(given)
    return parse_weights([given] if isinstance(given, str) else given)


def open_binding(checkpoint: AnyPath, family: AnyPath | None = None) -> Binding:
    """Read a checkpoint's headers and give every tensor its row of the family table (`family`: the user's own).

    An output stands for the checkpoint that it was made from; its own family table is used.
    """
    opened = open_stored(Path(checkpoint))
    if opened.sharded and family is None:
        return bind(opened, read_family(kept_family(opened.folder)))
    return bind(opened, load_family(opened.config, Path(family) if family is not None else None))


def open_model(path: AnyPath | Binding, family: AnyPath | None = None) -> Binding:
    """What is to be planned for: a checkpoint's folder, or a config.json alone (the file, or the folder that holds it).

    Where there are both, names and shapes must agree, and the notes name the first weight that is stored in another
    type or format than the config says. What was opened before is passed through.
    """
    if isinstance(path, Binding):
        return path
    alone = config_alone(Path(path))
    if alone is None:
        binding = open_binding(Path(path).parent if Path(path).is_file() else path, family)
        return replace(binding, notes=(*binding.notes, *disagreements(binding)))
    config, digest = read_config(alone)
    return bind_config(config, digest, alone, load_family(config, Path(family) if family is not None else None))


def plan_memory(checkpoint: AnyPath | Binding, cluster: str, **options: Any) -> Plan:
    """The plan that find_plan finds, with the same options. `plan.fits` says whether it fits."""
    return find_plan(checkpoint, cluster, **options).plan


def find_plan(
    checkpoint: AnyPath | Binding,
    cluster: str,
    *,
    tp: int | None = None,
    pp: int | None = None,
    dp: int | None = None,
    ep: int | None = None,
    etp: int | None = None,
    mtp: str = "keep",
    strict_blocks: bool = False,
    weights: Weights = (),
    family: AnyPath | None = None,
    goal: str = "throughput",
    tp_across_nodes: bool = False,
    expert_load: AnyPath | None = None,
    redundant_experts: int | None = None,
    **load: Any,
) -> Found:
    """The best plan for a cluster (`4x8:80GB`) and what else the search knows; sizes that are given are kept.

    `checkpoint`: its folder, or a config.json alone, before the weights are there; or what open_model made of them.
    `weights`: what isn't kept as stored, as `parse_weights` reads it or as group -> format. `goal`: throughput,
    latency, context or fewest-cards. `load`: fields of Workload (context, concurrency, kv_dtype, engine, ...).
    """
    sizes = {"tp": tp, "pp": pp, "dp": dp, "ep": ep, "etp": etp}
    cards, binding = parse_cluster(cluster), open_model(checkpoint, family)
    counts = read_load(Path(expert_load), binding) if expert_load is not None else None
    workload = make_workload(binding.model, **load)
    check_held(mtp, binding.source)
    found = explore(
        binding, cards, sizes, workload, mtp, strict_blocks, goal, tp_across_nodes, counts, redundant_experts,
        weights=as_weights(weights),
    )  # fmt: skip
    return replace(found, loaders=find_loaders(binding, found.plan))


def itemise(checkpoint: AnyPath | Binding, plan: Plan, by: str, family: AnyPath | None = None) -> tuple[Lines, ...]:
    """The ledger of the fullest rank of each stage, summed by `stage`, `layer` or `operator`."""
    return stage_lines(Payload(open_model(checkpoint, family), plan.strict_blocks, plan.weights), plan, by)


def count_memory(
    checkpoint: AnyPath | Binding, plan: Plan | AnyPath, cluster: str | None = None, family: AnyPath | None = None
) -> Plan:
    """The plan with its ledger counted anew, after an edit or for another cluster.

    Raises PlanError where it doesn't fit the checkpoint, or neither it nor the caller names a cluster.
    """
    binding = open_model(checkpoint, family)
    plan = check_plan(plan if isinstance(plan, Plan) else read_plan(Path(plan)), binding)
    if cluster is not None:
        plan = replace(plan, cluster=parse_cluster(cluster))
    if plan.cluster is None:
        raise PlanError("the plan names no cluster to count its memory for; give --cluster NODESxCARDS:CARD")
    if plan.cluster.world < plan.grid.world:
        raise PlanError(
            f"the plan has {plan.grid.world} ranks, the cluster {plan.cluster.text} {plan.cluster.world} cards"
        )
    place(binding, plan)  # cuts that aren't possible are refused here
    return with_ledger(plan, binding)


def inspect(path: AnyPath, family: AnyPath | None = None) -> Inspection:
    """Say what a checkpoint, config.json, plan or output is."""
    return inspect_path(Path(path), Path(family) if family is not None else None)
