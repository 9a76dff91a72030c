"""Whether a plan and a checkpoint belong together."""

from __future__ import annotations

from shard_plans.documents.plan import Plan
from shard_plans.errors import PlanError
from shard_plans.families.binding import Binding


def check_plan(plan: Plan, binding: Binding) -> None:
    """Raise PlanError where a plan belongs to another checkpoint, or its stages or experts don't fit the model."""
    checkpoint, model = binding.checkpoint, binding.model
    if plan.checkpoint.fingerprint != checkpoint.fingerprint:
        raise PlanError(
            f"the plan is for another checkpoint: it names the fingerprint {plan.checkpoint.fingerprint} "
            f"({plan.checkpoint.tensors} tensors, {plan.checkpoint.bytes} bytes), {checkpoint.folder} has "
            f"{checkpoint.fingerprint} ({len(checkpoint)} tensors, {checkpoint.total_bytes} bytes); plan it anew"
        )
    if plan.checkpoint.family != binding.family.name:
        raise PlanError(f"the plan was made with the family {plan.checkpoint.family}, not {binding.family.name}")
    starts = [0, *(stop for _, stop in plan.stages[:-1])]
    joined = all(first == start < stop for start, (first, stop) in zip(starts, plan.stages, strict=True))
    if len(plan.stages) != plan.grid.pp or not joined:
        raise PlanError(f"the stages {plan.stages} aren't {plan.grid.pp} layer ranges that follow one another from 0")
    forward = len(model.forward_layers)
    kept = len(model.layers) if plan.mtp == "keep" else forward
    if plan.stages[-1][1] != kept:
        mtp = f" (of which {kept - forward} for multi-token prediction)" if kept > forward else ""
        raise PlanError(f"stages end with layer {plan.stages[-1][1] - 1}, but the model keeps {kept} layers{mtp}")
    if plan.stages[-1][0] > forward - 1 and forward:
        raise PlanError(
            f"the last stage begins with layer {plan.stages[-1][0]}; every stage must hold one of the {forward} layers "
            f"that run, and layers for multi-token prediction lie on the last stage"
        )
    count = max((len(p.parts[0].tensors) for p in binding.parameters if p.per_expert), default=0)
    if not count:
        if plan.experts.default:
            raise PlanError(f"the plan places experts, but this {model.family} model has none; write `experts: none`")
        return
    if not plan.experts.default:
        raise PlanError(f"the plan says `experts: none`, but this {model.family} model has {count}")
    plan.experts.validate(count, plan.grid)
    moe = {p.layer for p in binding.parameters if p.per_expert}
    for layer in plan.experts.layers:
        if layer not in moe:
            raise PlanError(f"experts / layers names layer {layer}, which has no experts in this model")
