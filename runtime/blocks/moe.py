"""The mixture-of-experts block: route, send tokens to their experts' ranks, multiply, send back, add up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from runtime.blocks.context import RankContext
from runtime.blocks.experts import Experts, held, products
from runtime.blocks.ffn import swiglu
from runtime.blocks.linear import check_inner, column_linear, expect_shape
from runtime.blocks.norms import weighted_norm
from runtime.blocks.probe import NOBODY, Probe
from runtime.blocks.router import Routing, route
from runtime.blocks.weights import LayerWeights, dense, take
from shard_plans.errors import RuntimeFault
from shard_plans.families.model import Layer


def moe(
    ctx: RankContext,
    layer: Layer,
    weights: LayerWeights,
    x: Tensor,
    ids: Tensor | None = None,
    probe: Probe = NOBODY,
) -> tuple[Tensor, Routing]:
    """Tokens x [T, hidden], equal on a replica's tp ranks -> (their experts' weighted sum [T, hidden], the routing).

    Each tp rank owns a slice of the tokens and sends it: all_to_all over ep, all_gather over etp, partial products of
    the experts held here, sums back over etp, all_to_all back, weighted sum at the owner, all_gather over tp.
    Where `latent`, what is sent is the token in the experts' own width; the router sees it in full. With the score
    `sigmoid_on_input` the weight multiplies what is sent, not what comes back (Llama 4).
    With the score `hash` moe.table [vocab, topk] gives the experts of each token id [T].
    A probe may send tokens elsewhere; the weights are then those of the experts that it names.
    Reads moe.router, moe.router_bias or moe.router.bias, experts.*, shared.*; moe.latent_down, latent_norm and
    latent_up where `latent`.
    """
    words, wide = layer.words, ctx.accumulate()
    role = {True: "moe.router_bias", "logits": "moe.router.bias"}.get(words.get("router_bias", False))
    bias = None if role is None else dense(take(weights, role), wide).flatten()
    router = dense(take(weights, "moe.router"), wide)
    check_inner("moe.router", router, x)
    if router.shape[0] != ctx.size("experts"):
        raise RuntimeFault(f"moe.router scores {router.shape[0]} experts, the model has {ctx.size('experts')}")
    topk = ctx.size("topk")
    routing = route(words, topk, x.to(wide), router, bias, _given(ctx, words, weights, ids))
    ctx.pulse.saw("moe.router", routing.weights)
    probe.saw("router", routing.scores_for_choice)
    instead = probe.routed(routing)
    if instead is not None:
        other = route(words, topk, x.to(wide), router, bias, instead)
        routing = replace(routing, indices=instead, weights=other.weights)
    slots = ctx.experts.slots(layer.index, ctx.grid)[ctx.at.edp * ctx.grid.ep : (ctx.at.edp + 1) * ctx.grid.ep]
    experts = held(weights, len(slots[ctx.at.ep]))
    tokens, tp = x.shape[0], ctx.grid.tp
    start, stop = tokens * ctx.at.tp // tp, tokens * (ctx.at.tp + 1) // tp
    choices = routing.indices[start:stop]
    owner = torch.arange(start, stop, device=x.device)[:, None].expand_as(choices).reshape(-1)
    slot, local = _destinations(slots, ctx.size("experts"), choices.reshape(-1), owner)
    order = torch.argsort(slot, stable=True)
    sent = column_linear(ctx, weights, "moe.latent_down", x[start:stop]) if words.get("latent") else x[start:stop]
    counts = torch.bincount(slot, minlength=len(slots))
    rows, shares = sent[owner[order] - start], routing.weights[start:stop]
    if words["score"] == "sigmoid_on_input":
        rows = (rows * shares.reshape(-1)[order, None]).to(ctx.compute)
        shares = torch.ones_like(shares)
    y = _through_experts(ctx, words, experts, rows, local[order], counts)
    back = torch.empty_like(y)
    back[order] = y
    out = combine(ctx, words, weights, back.view(*choices.shape, y.shape[1]), shares)
    if tp > 1:
        out = torch.cat(ctx.comm.all_gather(out, ctx.grid.tp_group(ctx.at)))
    probe.saw("experts", out)
    if words.get("shared") is not None:
        y = shared(ctx, words, weights, x)
        probe.saw("shared", y)
        out = out + y
    return out, routing


def _given(ctx: RankContext, words: Mapping[str, Any], weights: LayerWeights, ids: Tensor | None) -> Tensor | None:
    """The experts that the ids alone decide [T, topk]; None where the router chooses."""
    if words["score"] != "hash":
        return None
    if ids is None:
        raise RuntimeFault("the router looks experts up by token id, and no ids came with the stream")
    table = take(weights, "moe.table").values
    expect_shape("moe.table", table, (ctx.size("vocab"), ctx.size("topk")))
    found = table[ids].long()
    if found.numel() and not 0 <= int(found.min()) <= int(found.max()) < ctx.size("experts"):
        raise RuntimeFault(f"moe.table names experts {int(found.min())} to {int(found.max())} of {ctx.size('experts')}")
    return found


def shared(ctx: RankContext, words: Mapping[str, Any], weights: LayerWeights, x: Tensor) -> Tensor:
    """The expert that every token x [T, hidden] goes to: [T, hidden], summed over tp; reads shared.*.

    `gated`: times the sigmoid of the token's product with shared.router [1, hidden].
    """
    y = swiglu(ctx, words, weights, "shared", "shared_ffn", x)
    if words["shared"] == "added":
        return y
    gate = column_linear(ctx, weights, "shared.router", x).to(ctx.accumulate())
    expect_shape("shared.router times x", gate, (x.shape[0], 1))
    return (y * gate.sigmoid()).to(ctx.compute)


def combine(ctx: RankContext, words: Mapping[str, Any], weights: LayerWeights, y: Tensor, shares: Tensor) -> Tensor:
    """The experts' products y [T, k, width], whole sums all of them, weighed by `shares` [T, k]: [T, hidden].

    Where `latent`, the norm (if there is one) and the way back to the hidden size come behind the sum.
    """
    out = (shares[..., None] * y.to(ctx.accumulate())).sum(1).to(ctx.compute)
    if not words.get("latent"):
        return out
    if "moe.latent_norm" in weights:
        out = weighted_norm(ctx, weights, "moe.latent_norm", out, ctx.model.words["eps"])
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
        partial = products(ctx, words, experts, torch.cat(gathered), torch.cat(comm.all_gather(ids, etp_group)))
        # A reduce-scatter with uneven parts, summed in rank order.
        parts = comm.all_to_all(torch.split(partial, [part.shape[0] for part in gathered]), etp_group)
        y = parts[0]
        for part in parts[1:]:
            y = y + part
    else:
        y = products(ctx, words, experts, rows, ids)
    if grid.ep > 1:
        y = torch.cat(comm.all_to_all(torch.split(y, back_sizes), ep_group))
    return y
