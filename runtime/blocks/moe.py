"""The mixture-of-experts block: route, send tokens to their experts' ranks, multiply, send back, add up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from runtime.blocks.context import RankContext
from runtime.blocks.ffn import gated, swiglu
from runtime.blocks.linear import check_inner, column_linear
from runtime.blocks.norms import rms_norm
from runtime.blocks.router import Routing, route
from runtime.blocks.weights import LayerWeights, Stored, dense, dense_expert, expert_count, optional, take
from shard_plans.errors import RuntimeFault
from shard_plans.families.model import Layer

Matrices = Stored | tuple[Stored, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """What this rank holds of the experts: stacked or listed matrices, and how many."""

    gate_up: tuple[Matrices, ...]
    """(gate_up,) fused, or (gate, up)."""
    down: Matrices
    count: int


def moe(ctx: RankContext, layer: Layer, weights: LayerWeights, x: Tensor) -> tuple[Tensor, Routing]:
    """Tokens x [T, hidden], equal on a replica's tp ranks -> (their experts' weighted sum [T, hidden], the routing).

    Each tp rank owns a slice of the tokens and sends it: all_to_all over ep, all_gather over etp, partial products of
    the experts held here, sums back over etp, all_to_all back, weighted sum at the owner, all_gather over tp.
    Where `latent`, what is sent is the token in the experts' own width; the router sees it in full.
    Reads moe.router, moe.router_bias, experts.gate_up (or .gate and .up), experts.down; moe.latent_down, latent_norm
    and latent_up where `latent`; and shared.* where `shared: added`.
    """
    words, wide = layer.words, ctx.accumulate()
    bias = dense(take(weights, "moe.router_bias"), wide) if words.get("router_bias") else None
    router = dense(take(weights, "moe.router"), wide)
    check_inner("moe.router", router, x)
    if router.shape[0] != ctx.size("experts"):
        raise RuntimeFault(f"moe.router scores {router.shape[0]} experts, the model has {ctx.size('experts')}")
    routing = route(words, ctx.size("topk"), x.to(wide), router, bias)
    slots = ctx.experts.slots(layer.index, ctx.grid)[ctx.at.edp * ctx.grid.ep : (ctx.at.edp + 1) * ctx.grid.ep]
    experts = _held(weights, len(slots[ctx.at.ep]))
    tokens, tp = x.shape[0], ctx.grid.tp
    start, stop = tokens * ctx.at.tp // tp, tokens * (ctx.at.tp + 1) // tp
    choices = routing.indices[start:stop]
    owner = torch.arange(start, stop, device=x.device)[:, None].expand_as(choices).reshape(-1)
    slot, local = _destinations(slots, ctx.size("experts"), choices.reshape(-1), owner)
    order = torch.argsort(slot, stable=True)
    sent = column_linear(ctx, weights, "moe.latent_down", x[start:stop]) if words.get("latent") else x[start:stop]
    counts = torch.bincount(slot, minlength=len(slots))
    y = _through_experts(ctx, words, experts, sent[owner[order] - start], local[order], counts)
    back = torch.empty_like(y)
    back[order] = y
    out = combine(ctx, words, weights, back.view(*choices.shape, y.shape[1]), routing.weights[start:stop])
    if tp > 1:
        out = torch.cat(ctx.comm.all_gather(out, ctx.grid.tp_group(ctx.at)))
    if words.get("shared") == "added":
        out = out + swiglu(ctx, words, weights, "shared", "shared_ffn", x)
    return out, routing


def combine(ctx: RankContext, words: Mapping[str, Any], weights: LayerWeights, y: Tensor, shares: Tensor) -> Tensor:
    """The experts' products y [T, k, width], whole sums all of them, weighed by `shares` [T, k]: [T, hidden].

    Where `latent`, the norm (if there is one) and the way back to the hidden size come behind the sum.
    """
    out = (shares[..., None] * y.to(ctx.accumulate())).sum(1).to(ctx.compute)
    if not words.get("latent"):
        return out
    norm = optional(weights, "moe.latent_norm")
    if norm is not None:
        out = rms_norm(out, dense(norm, ctx.compute), ctx.model.words["eps"])
    return column_linear(ctx, weights, "moe.latent_up", out)


def _destinations(slots: Sequence[Sequence[int]], experts: int, chosen: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """For each (token, chosen expert): the ep slot to send to and the expert's number there; copies taken in turn."""
    copies: list[list[tuple[int, int]]] = [[] for _ in range(experts)]
    for slot, ids in enumerate(slots):
        for local, expert in enumerate(ids):
            copies[expert].append((slot, local))
    absent = [expert for expert, places in enumerate(copies) if not places]
    if absent:
        raise RuntimeFault(f"expert {absent[0]} is held by no ep slot, tokens that choose it can't be sent")
    most = max(len(places) for places in copies)
    table = torch.tensor([[places[i % len(places)] for i in range(most)] for places in copies], device=chosen.device)
    counts = torch.tensor([len(places) for places in copies], device=chosen.device)
    place = table[chosen, token % counts[chosen]]
    return place[:, 0], place[:, 1]


def _through_experts(
    ctx: RankContext, words: Mapping[str, Any], experts: Experts, x: Tensor, local: Tensor, counts: Tensor
) -> Tensor:
    """Send rows x, sorted by ep slot, to their experts' ranks and bring the products back in the same order."""
    grid, comm = ctx.grid, ctx.comm
    ep_group, etp_group = grid.ep_group(ctx.at), grid.etp_group(ctx.at)
    sizes: list[int] = counts.tolist()
    came, came_local = [x], [local]
    if grid.ep > 1:
        came = comm.all_to_all(torch.split(x, sizes), ep_group)
        came_local = comm.all_to_all(torch.split(local, sizes), ep_group)
    back_sizes = [part.shape[0] for part in came]
    rows, ids = torch.cat(came), torch.cat(came_local)
    if grid.etp > 1:
        gathered = comm.all_gather(rows, etp_group)
        partial = _products(ctx, words, experts, torch.cat(gathered), torch.cat(comm.all_gather(ids, etp_group)))
        # A reduce-scatter with uneven parts, summed in rank order.
        parts = comm.all_to_all(torch.split(partial, [part.shape[0] for part in gathered]), etp_group)
        y = parts[0]
        for part in parts[1:]:
            y = y + part
    else:
        y = _products(ctx, words, experts, rows, ids)
    if grid.ep > 1:
        y = torch.cat(comm.all_to_all(torch.split(y, back_sizes), ep_group))
    return y


def _products(ctx: RankContext, words: Mapping[str, Any], experts: Experts, x: Tensor, local: Tensor) -> Tensor:
    """Each row through the expert `local` says: down(gated(gate x, up x)), grouped by expert; partial if etp > 1."""
    order = torch.argsort(local, stable=True)
    out = torch.empty_like(x)
    start = 0
    for expert, count in enumerate(torch.bincount(local, minlength=experts.count).tolist()):
        if not count:
            continue
        rows = order[start : start + count]
        start += count
        h = x[rows]
        parts = []
        for stored in experts.gate_up:
            matrix = dense_expert(stored, expert, ctx.compute)
            check_inner(f"experts.gate, expert {expert} of this rank", matrix, h)
            parts.append(functional.linear(h, matrix))
        gate, up = torch.cat(parts, dim=-1).chunk(2, dim=-1)
        down = dense_expert(experts.down, expert, ctx.compute)
        check_inner(f"experts.down, expert {expert} of this rank", down, gate)
        out[rows] = functional.linear(gated(words, gate, up), down)
    return out


def _held(weights: LayerWeights, count: int) -> Experts:
    """The expert matrices of this rank, checked against the number that the placement gives it."""
    names = ("experts.gate_up",) if "experts.gate_up" in weights else ("experts.gate", "experts.up")
    found = []
    for name in (*names, "experts.down"):
        if name not in weights:
            raise RuntimeFault(f"the weight {name} is missing; the layer holds {', '.join(sorted(weights))}")
        stored = weights[name]
        if expert_count(stored) != count:
            raise RuntimeFault(f"{name} holds {expert_count(stored)} experts, the plan gives this rank {count}")
        found.append(stored)
    return Experts(tuple(found[:-1]), found[-1], count)
