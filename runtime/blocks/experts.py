"""The experts of one rank: their matrices as stored, and tokens through them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from runtime.blocks.context import RankContext
from runtime.blocks.ffn import gated
from runtime.blocks.linear import check_inner
from runtime.blocks.weights import LayerWeights, Stored, dense_expert, expert_count
from shard_plans.errors import RuntimeFault

Matrices = Stored | tuple[Stored, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """What this rank holds of the experts: stacked or listed matrices and their biases, and how many."""

    gate_up: tuple[Matrices, ...]
    """(gate_up,) fused, or (gate, up)."""
    down: Matrices
    count: int
    gate_up_bias: Matrices | None = None
    down_bias: Matrices | None = None
    """Whole on every etp rank, so that it counts on the first one alone."""


def held(weights: LayerWeights, count: int) -> Experts:
    """The expert matrices of this rank, checked against the number that the placement gives it."""
    names: Sequence[str] = ("experts.gate_up",) if "experts.gate_up" in weights else ("experts.gate", "experts.up")
    *gate_up, down = (_take(weights, name, count) for name in (*names, "experts.down"))
    biases = [
        _take(weights, name, count) if name in weights else None
        for name in ("experts.gate_up.bias", "experts.down.bias")
    ]
    return Experts(tuple(gate_up), down, count, biases[0], biases[1])


def _take(weights: LayerWeights, name: str, count: int) -> Matrices:
    if name not in weights:
        raise RuntimeFault(f"the weight {name} is missing; the layer holds {', '.join(sorted(weights))}")
    stored = weights[name]
    if expert_count(stored) != count:
        raise RuntimeFault(f"{name} holds {expert_count(stored)} experts, the plan gives this rank {count}")
    return stored


def products(ctx: RankContext, words: Mapping[str, Any], experts: Experts, x: Tensor, local: Tensor) -> Tensor:
    """Each row through the expert `local` says: down(gated(gate x, up x)), grouped by expert; partial if etp > 1.

    `expert_sides` says how a plain matrix is stored: [out, in], or with `in_out` and `in_out_unless_packed` the other
    way round. `expert_pairs: interleaved`: rows of a fused gate_up are gate, up, gate, up, ..., not halves.
    """
    order = torch.argsort(local, stable=True)
    out = torch.empty_like(x)
    start = 0
    for expert, count in enumerate(torch.bincount(local, minlength=experts.count).tolist()):
        if not count:
            continue
        rows = order[start : start + count]
        start += count
        h, parts = x[rows], []
        for stored in experts.gate_up:
            parts.append(_product(ctx, words, "experts.gate", stored, expert, h))
        both = torch.cat(parts, dim=-1)
        if experts.gate_up_bias is not None:
            both = both + dense_expert(experts.gate_up_bias, expert, ctx.compute)
        if words.get("expert_pairs") == "interleaved":
            gate, up = both[:, 0::2], both[:, 1::2]
        else:
            gate, up = both.chunk(2, dim=-1)
        y = _product(ctx, words, "experts.down", experts.down, expert, gated(words, gate, up))
        if experts.down_bias is not None and ctx.at.etp == 0:
            y = y + dense_expert(experts.down_bias, expert, ctx.compute)
        out[rows] = y
    return out


def _product(ctx: RankContext, words: Mapping[str, Any], name: str, stored: Matrices, expert: int, x: Tensor) -> Tensor:
    """Tokens x [rows, in] times one expert's matrix: [rows, out]."""
    matrix = dense_expert(stored, expert, ctx.compute)
    format = stored.format if isinstance(stored, Stored) else stored[expert].format
    sides = words.get("expert_sides")
    if sides == "in_out" or (sides == "in_out_unless_packed" and format is None):
        matrix = matrix.T
    check_inner(f"{name}, expert {expert} of this rank", matrix, x)
    return ctx.pulse.saw(name, functional.linear(x, matrix))
