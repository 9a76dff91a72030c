"""The native layout: names, fusion and stacking of what a rank holds, and the order inside a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shard_plans.checkpoints.dtypes import DTYPE_BITS
from shard_plans.families.parameter import Parameter
from shard_plans.placement.cuts import ParameterCut
from shard_plans.placement.shards import ShardTensor, Source

PAGE = 4096
"""Tensors whose size is a multiple of this lie on its multiples in the file."""

FUSED = {
    ("attn.q", "attn.k", "attn.v"): "attn.qkv",
    ("attn.q.bias", "attn.k.bias", "attn.v.bias"): "attn.qkv.bias",
    ("mlp.gate", "mlp.up"): "mlp.gate_up",
    ("shared.gate", "shared.up"): "shared.gate_up",
    ("experts.gate", "experts.up"): "experts.gate_up",
}
"""Roles whose rows are laid one after the other where type, format and block agree."""


@dataclass(frozen=True, slots=True)
class Held:
    """One parameter as one rank holds it."""

    parameter: Parameter
    cut: ParameterCut
    experts: tuple[int, ...] | None
    """Ids in stacking order; None where the parameter isn't one an expert."""


def layer_tensors(held: Sequence[Held]) -> list[ShardTensor]:
    """Shard tensors of one layer (or of what lies outside the layers), in execution order."""
    by_role = {h.parameter.role: h for h in held}
    member_of = {role: roles for roles in FUSED for role in roles}
    done: set[str] = set()
    tensors: list[ShardTensor] = []
    for h in held:
        role = h.parameter.role
        if role in done:
            continue
        roles = member_of.get(role, (role,))
        members = [by_role[r] for r in roles if r in by_role]
        if len(roles) > 1 and all(_fusable(group, by_role) for group in _together(roles)):
            tensors += stack(members, _named(FUSED[roles], members[0].parameter))
            done.update(roles)
        else:
            tensors += stack([h], _named(role, h.parameter))
    return tensors


def _together(roles: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The roles and their biases (or the weights of these biases): both are fused, or neither."""
    weights = tuple(role.removesuffix(".bias") for role in roles)
    return [group for group in (weights, tuple(f"{role}.bias" for role in weights)) if group in FUSED]


def _fusable(roles: tuple[str, ...], by_role: Mapping[str, Held]) -> bool:
    """One type and format; columns alike; and no member but the last may end inside a scale block; or none is there."""
    members = [by_role[role] for role in roles if role in by_role]
    if not members:
        return True
    if len(members) < len(roles):
        return False
    first = members[0]
    if len(first.cut.parts) > 2:
        return False  # each matrix has a scale of its own
    for member in members:
        kinds = [(p.part.kind, p.part.dtype, p.shape[1:]) for p in member.cut.parts]
        if kinds != [(p.part.kind, p.part.dtype, p.shape[1:]) for p in first.cut.parts]:
            return False
        if (member.cut.block, member.experts) != (first.cut.block, first.experts):
            return False
    block = first.cut.block
    return block is None or all(member.cut.parts[0].shape[0] % block[0] == 0 for member in members[:-1])


def stack(members: Sequence[Held], name: Callable[[str], str]) -> list[ShardTensor]:
    """Members laid one after the other along their rows, a shard tensor for each part; experts stacked before that.

    `name` gives the tensor's name for a part (values, scale).
    """
    first = members[0]
    format = first.parameter.format.name if first.parameter.format is not None else None
    tensors = []
    for number, part in enumerate(first.cut.parts):
        sources, rows = [], 0
        for member in members:
            cut = member.cut.parts[number]
            ids = cut.part.tensors if member.experts is None else cut.part.tensors[list(member.experts)]
            at = (rows, *(0 for _ in cut.shape[1:]))
            converted = member.parameter if member.parameter.source is not None else None
            stored = cut.part.dtype if cut.widened is not None else None
            pattern = cut.part.pattern
            sources.append(Source(pattern, member.experts, cut.cuts, at, ids, converted, cut.arranged, stored))
            rows += cut.shape[0]
        shape = (rows, *part.shape[1:])
        if first.experts is not None:
            shape = (len(first.experts), *shape)
        tensors.append(
            ShardTensor(
                name(part.part.kind), part.dtype, shape, tuple(sources), format, part.part.kind, first.cut.block
            )
        )
    return tensors


def _named(role: str, parameter: Parameter) -> Callable[[str], str]:
    """Native names of a parameter's parts: the stem, and STEM.scale."""
    stem = _stem(role, parameter)
    return lambda kind: stem if kind == "values" else f"{stem}.{kind}"


def _stem(role: str, parameter: Parameter) -> str:
    """Native name: `layers.3.attn.qkv`, `vision.5.qkv`, `norm`."""
    if parameter.layer is not None:
        return f"layers.{parameter.layer}.{role}"
    return role if parameter.number is None else role.replace(".", f".{parameter.number}.", 1)


def file_order(tensors: Sequence[ShardTensor]) -> tuple[ShardTensor, ...]:
    """Multiples of a page first, in execution order, hence page-aligned; then the small ones, wide types first."""
    large = [tensor for tensor in tensors if tensor.nbytes % PAGE == 0]
    small = [tensor for tensor in tensors if tensor.nbytes % PAGE]
    return (*large, *sorted(small, key=lambda tensor: -DTYPE_BITS[tensor.dtype]))
