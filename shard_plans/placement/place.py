"""A plan laid out: for every file of every stage, its tensors and the exact pieces of stored tensors that make them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from shard_plans.documents.plan import Plan
from shard_plans.errors import GridError
from shard_plans.families.binding import Binding
from shard_plans.families.dims import Share, divides, extent
from shard_plans.families.parameter import Parameter
from shard_plans.placement.cuts import Cutter
from shard_plans.placement.grid import Grid
from shard_plans.placement.layout import Held, file_order, layer_tensors
from shard_plans.placement.precision import in_precision
from shard_plans.placement.shards import Constant, Placement, ShardFile, ShardTensor, Skipped


def place(binding: Binding, plan: Plan) -> Placement:
    """Lay out every file of the plan.

    Raises GridError where parallel sizes don't divide the model (the legal ones are named), PlanError where stages or
    experts don't cover it.
    """
    grid = plan.grid
    binding = in_precision(binding, plan.weights)
    check_divides(binding, grid)
    cutter = Cutter(binding.model, binding.family.uneven, plan.strict_blocks)
    files: list[ShardFile] = []
    for stage in range(grid.pp):
        parameters = stage_parameters(binding, plan, stage)
        for tp in range(grid.tp):
            held = (Held(p, cutter.cut(p, {"tp": Share(tp, grid.tp)}), None) for p in parameters if not p.per_expert)
            files.append(_file(f"stage-{stage}-tp-{tp}", {"stage": stage, "tp": tp}, held))
        experts = [p for p in parameters if p.per_expert]
        if experts:
            files += _expert_files(plan, stage, experts, cutter)
    by_place = {tuple(file.place.items()): file.name for file in files}
    ranks = []
    for at in grid.coordinates():
        places = (
            {"stage": at.stage, "tp": at.tp},
            {"stage": at.stage, "ep": at.ep, "etp": at.etp},
            {"stage": at.stage, "edp": at.edp, "ep": at.ep, "etp": at.etp},
        )
        names = [by_place[key] for place in places if (key := tuple(place.items())) in by_place]
        ranks.append((at, tuple(names)))
    return Placement(tuple(files), tuple(ranks), skipped(binding, plan), constants(binding, plan))


def stage_parameters(binding: Binding, plan: Plan, stage: int) -> list[Parameter]:
    """What lies on a stage, in execution order; a tied embedding lies on the first and, where pp > 1, on the last."""
    first, last = plan.stages[stage]
    is_last = stage == plan.grid.pp - 1
    kept = []
    for parameter in binding.parameters:
        if parameter.layer is None:
            wanted = is_last if parameter.stage == "last" else stage == 0
            if parameter.role == "embed" and binding.model.tied and is_last and stage:
                parameter, wanted = replace(parameter, role="head"), True
        elif parameter.stage == "mtp":
            wanted = is_last and plan.mtp == "keep"
        else:
            wanted = first <= parameter.layer < last
        if wanted:
            kept.append(parameter)
    return sorted(kept, key=_order)


def _order(parameter: Parameter) -> tuple[float, int]:
    """Execution order: embedding and tower, the layers, then norm and head."""
    if parameter.layer is not None:
        return parameter.layer, 0
    return (math.inf if parameter.stage == "last" or parameter.role == "head" else -1), parameter.number or 0


def _expert_files(plan: Plan, stage: int, experts: list[Parameter], cutter: Cutter) -> Iterator[ShardFile]:
    grid = plan.grid
    apart = plan.experts.replicas_differ(grid)
    for edp in range(grid.edp if apart else 1):
        for ep in range(grid.ep):
            for etp in range(grid.etp):
                place = {"stage": stage, **({"edp": edp} if apart else {}), "ep": ep, "etp": etp}
                held = (
                    Held(
                        p, cutter.cut(p, {"etp": Share(etp, grid.etp)}), plan.experts.held(p.layer or 0, grid, edp, ep)
                    )
                    for p in experts
                )
                yield _file("-".join(f"{key}-{value}" for key, value in place.items()), place, held)


def _file(stem: str, place: dict[str, int], held: Iterator[Held]) -> ShardFile:
    by_layer: dict[object, list[Held]] = {}
    for h in held:
        where = h.parameter.layer if h.parameter.layer is not None else (h.parameter.role, h.parameter.number)
        by_layer.setdefault(where, []).append(h)
    tensors: list[ShardTensor] = [tensor for group in by_layer.values() for tensor in layer_tensors(group)]
    return ShardFile(f"{stem}.safetensors", place, file_order(tensors))


def skipped(binding: Binding, plan: Plan) -> tuple[Skipped, ...]:
    """Stored tensors that the plan leaves out: the MTP layers under `--mtp drop`."""
    if plan.mtp == "keep":
        return ()
    mtp = (p for p in binding.parameters if p.stage == "mtp")
    return left_out(mtp, "multi-token-prediction layer left out by --mtp drop")


def left_out(parameters: Iterable[Parameter], reason: str) -> tuple[Skipped, ...]:
    """What is stored of the parameters, as left out."""
    stored = (p.source or p for p in parameters)
    return tuple(Skipped(part.pattern, part.stored, part.nbytes, reason) for p in stored for part in p.all_parts)


def constants(binding: Binding, plan: Plan) -> tuple[Constant, ...]:
    """What no rank holds because it is known: tails of zeros, and tensors that repeat the shape of others."""
    found = []
    for parameter in binding.parameters:
        if parameter.stage == "mtp" and plan.mtp == "drop":
            continue
        part = parameter.parts[0]
        for axis, (used, stored) in enumerate(zip(part.used, part.shape, strict=True)):
            if used < stored:
                region = tuple((used if a == axis else 0, length) for a, length in enumerate(part.shape))
                found.append(Constant(part.pattern, region, part.tensors, f"{parameter.role}: zeros behind its {used}"))
        if parameter.shape is not None:
            size = tuple(extent(dim, binding.model.sizes) for dim in parameter.dims[-2:])
            reason = f"{parameter.role}: rows and columns of the values"
            found.append(Constant(parameter.shape.pattern, ((0, 2),), parameter.shape.tensors, reason, size))
    return tuple(found)


def check_divides(binding: Binding, grid: Grid) -> None:
    """Raise GridError for the first size that a parallel size doesn't divide; the legal sizes are named."""
    model, uneven = binding.model, binding.family.uneven
    for axis, count in (("tp", grid.tp), ("etp", grid.etp)):
        sizes = _dealt(binding, axis)
        bad = next((name for name in sizes if not divides(model.sizes[name], uneven.get(name, "refuse"), count)), None)
        if bad is not None and (axis == "tp" or _has_experts(binding)):
            raise GridError(
                f"{axis} {count} doesn't divide {bad} {model.sizes[bad]} of this {model.family} model; "
                f"legal {axis}: {', '.join(map(str, legal_sizes(binding, axis)))}"
            )
    experts = model.sizes.get("experts", 0)
    if not _has_experts(binding) and (grid.ep > 1):
        raise GridError(f"ep {grid.ep}: this {model.family} model has no experts; dense models take ep 1 only")
    if _has_experts(binding) and grid.ep > experts:
        raise GridError(f"ep {grid.ep} is more than the model's {experts} experts; legal ep: 1 to {experts}")
    layers = len(model.forward_layers)
    if grid.pp > layers:
        raise GridError(f"pp {grid.pp} is more than the model's {layers} layers; legal pp: 1 to {layers}")


def _has_experts(binding: Binding) -> bool:
    return any(parameter.per_expert for parameter in binding.parameters)


def _dealt(binding: Binding, axis: str) -> Mapping[str, None]:
    """Names of the sizes that are dealt to an axis by some stored parameter, in order."""
    return {
        size: None
        for parameter in binding.parameters
        for dim in parameter.dims
        for marked, size in sorted(dim.marks)
        if marked == axis
    }


def legal_sizes(binding: Binding, axis: str) -> list[int]:
    """All counts up to the number of heads (tp) or of expert columns (etp, at most 64) that divide what is cut."""
    model, uneven = binding.model, binding.family.uneven
    sizes = [(model.sizes[name], uneven.get(name, "refuse")) for name in _dealt(binding, axis)]
    limit = min((size for size, rule in sizes if rule == "refuse"), default=1)
    counts = range(1, min(limit, 4096 if axis == "tp" else 64) + 1)
    return [count for count in counts if all(divides(size, rule, count) for size, rule in sizes)]
