"""Whether a plan and a checkpoint belong together."""

from __future__ import annotations

from dataclasses import replace

from shard_plans.checkpoints.checkpoint import Checkpoint
from shard_plans.checkpoints.expected import Expected
from shard_plans.documents.plan import Plan, PlanSource
from shard_plans.errors import PlanError
from shard_plans.families.agreement import differences
from shard_plans.families.binding import Binding


def check_held(mtp: str, source: Checkpoint | Expected) -> None:
    """Raise PlanError where a plan keeps what the shards that stand for the checkpoint were made without."""
    if mtp == "keep" and isinstance(source, Checkpoint) and source.left_out:
        raise PlanError(
            f"{source.folder} was made with --mtp drop: it lacks the multi-token-prediction layers "
            f"({source.left_out[0]} and {len(source.left_out) - 1} more), which this plan keeps; "
            f"plan with --mtp drop, or start from the checkpoint"
        )


def plan_source(binding: Binding) -> PlanSource:
    """What a plan for this binding names as its checkpoint: a fingerprint, or the digest of the config.json alone."""
    source = binding.source
    config = source.config_digest if isinstance(source, Expected) else None
    return PlanSource(binding.family.name, source.fingerprint, len(source), source.total_bytes, config)


def check_plan(plan: Plan, binding: Binding) -> Plan:
    """The plan; one that was made from config.json alone gets the fingerprint of the checkpoint that agrees with it.

    Raises PlanError where the plan belongs to another checkpoint, or its stages or experts don't fit the model.
    """
    if plan.checkpoint.family != binding.family.name:
        raise PlanError(f"the plan was made with the family {plan.checkpoint.family}, not {binding.family.name}")
    plan = _belongs(plan, binding)
    check_held(plan.mtp, binding.source)
    _check_layers(plan, binding)
    _check_experts(plan, binding)
    return plan


def _belongs(plan: Plan, binding: Binding) -> Plan:
    whose, here = plan.checkpoint, plan_source(binding)
    if whose.config is None and here.config is None:
        same = (whose.fingerprint, whose.tensors, whose.bytes) == (here.fingerprint, here.tensors, here.bytes)
        names = f"the fingerprint {whose.fingerprint}", here.fingerprint
    elif whose.config is None:  # a checkpoint's plan counted by its config: all that can be compared
        same, names = (
            (whose.tensors, whose.bytes) == (here.tensors, here.bytes),
            ("a checkpoint", "a config.json alone"),
        )
    else:
        same = whose.config == binding.source.config_digest
        names = f"a config.json of digest {whose.config}", binding.source.config_digest
    if not same:
        raise PlanError(
            f"the plan is for another checkpoint: it names {names[0]} ({whose.tensors} tensors, {whose.bytes} bytes), "
            f"{binding.source.folder} has {names[1]} ({here.tensors} tensors, {here.bytes} bytes); plan it anew"
        )
    if whose.config is None or here.config is not None:
        return plan
    other = next(differences(binding), None)
    if other is not None:
        raise PlanError(f"the plan was made from config.json alone, but {other.text}; plan the checkpoint anew")
    return replace(plan, checkpoint=here)


def _check_layers(plan: Plan, binding: Binding) -> None:
    model = binding.model
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


def _check_experts(plan: Plan, binding: Binding) -> None:
    model = binding.model
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
