"""Bugs that are a wrong line of a block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from runtime.blocks import experts, ffn, gdn, gqa, kda, mla, moe, mxfp4, weights
from runtime.blocks.attention import attend
from runtime.blocks.context import RankContext
from runtime.blocks.mask import Mask
from runtime.blocks.router import Routing
from runtime.blocks.weights import dense, optional
from tests.mutations.bug import Bug, Site
from tests.mutations.code import replace_in_layer

Right = Callable[..., Tensor]


def softmax(site: Site) -> bool:
    """The layer has softmax attention."""
    return site.word("attn") in ("gqa", "mla")


def attention(site: Site) -> Any:
    """The module of its block."""
    return gqa if site.word("attn") == "gqa" else mla


def next_kv_head(right: Right, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    """Query heads take KV heads in turn, not in stretches."""
    heads = q.shape[1]
    turn = torch.arange(heads) % k.shape[1]
    return attend(q, k[:, turn], v[:, turn], *rest)


def one_ahead(right: Right, q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Mask, *rest: Any) -> Tensor:
    """A query sees the key behind it."""
    return attend(q, k, v, scale, replace(mask, positions=mask.positions + 1), *rest)


def square(right: Right, q: Tensor, k: Tensor, v: Tensor, scale: float, *rest: Any) -> Tensor:
    """Divided by the width, not by its root."""
    return attend(q, k, v, scale / q.shape[-1] ** 0.5, *rest)


def coarse(right: Right, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    """Shares in bf16."""
    return attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), *rest).to(q.dtype)


def bias_of_every_rank(right: Right, ctx: RankContext, weights: Any, role: str, x: Tensor) -> Tensor:
    """Each tp rank adds the bias before the sum."""
    bias = optional(weights, f"{role}.bias")
    y = right(ctx, weights, role, x)
    return y if bias is None else y + (ctx.grid.tp - 1) * dense(bias, ctx.compute)


def doubled(right: Right, *given: Any) -> Tensor:
    """Added twice."""
    return 2 * right(*given)


def unweighted(right: Right, ctx: Any, words: Any, weights: Any, y: Tensor, shares: Tensor) -> Tensor:
    """All experts of a token count alike."""
    return right(ctx, words, weights, y, torch.full_like(shares, 1 / shares.shape[1]))


def swapped(right: Right, words: Any, gate: Tensor, up: Tensor) -> Tensor:
    """w1 and w3 exchanged."""
    return right(words, up, gate)


def next_slot(
    right: Callable[..., tuple[Tensor, Tensor]], slots: Any, count: int, chosen: Tensor, token: Tensor
) -> tuple[Tensor, Tensor]:
    """The expert's number in its rank is one off."""
    slot, local = right(slots, count, chosen, token)
    held = torch.tensor([len(ids) for ids in slots])
    return slot, (local + 1) % held[slot]


def next_rank(
    right: Callable[..., tuple[Tensor, Tensor]], slots: Any, count: int, chosen: Tensor, token: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens are sent to the rank behind the one that holds the expert."""
    slot, local = right(slots, count, chosen, token)
    return (slot + 1) % len(slots), local


def full(right: Right, ctx: Any, words: Any, held: Any, x: Tensor, local: Tensor) -> Tensor:
    """An expert drops all but the first of its tokens: its capacity is one."""
    y = right(ctx, words, held, x, local).clone()
    for expert in range(held.count):
        y[(local == expert).nonzero().flatten()[1:]] = 0
    return y


def bias_of_every_part(right: Right, ctx: RankContext, *rest: Any) -> Tensor:
    """Every etp rank adds the bias of the experts' last product."""
    return right(replace(ctx, at=replace(ctx.at, etp=0)), *rest)


def router_in_bf16(right: Callable[..., Routing], words: Any, topk: int, *given: Tensor | None) -> Routing:
    """Scores and choice in bf16."""
    found = right(words, topk, *(None if x is None else x.bfloat16() for x in given))
    return replace(
        found,
        weights=found.weights.float(),
        scores_for_choice=found.scores_for_choice.float(),
        margin=found.margin.float(),
    )


def scales_divide(right: Right, values: Tensor, scale: Tensor, whole: Any, format: str, *rest: Any) -> Tensor:
    """Divided by the scale, not multiplied."""
    return right(values, 1 / scale, whole, format, *rest)


def forgets(right: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Any:
    """A chunk doesn't begin with the state behind the one before."""
    pieces = [right(*(x[:, i : i + 16] for x in (q, k, v, g, beta)), state) for i in range(0, q.shape[1], 16)]
    return torch.cat([o for o, _ in pieces], dim=1), pieces[-1][1]


def no_decay(right: Right, *given: Any) -> Tensor:
    """Nothing is forgotten."""
    return torch.zeros_like(right(*given))


def line(
    name: str, place: str, fits: Callable[[Site], bool], owner: Callable[[Site], Any] | Any, attribute: str, wrong: Any,
    like: str = "",
) -> Bug:  # fmt: skip
    """A function of the layer's blocks that is another one."""

    def inject(site: Site) -> None:
        replace_in_layer(
            site.patch,
            site.layer.index,
            owner(site) if callable(owner) and not isinstance(owner, type) else owner,
            attribute,
            wrong,
        )

    return Bug(name, place, fits, inject, like=like)


def experts_here(site: Site) -> bool:
    """The layer has experts."""
    return bool(site.word("ffn") == "moe")


def split(axis: str) -> Callable[[Site], bool]:
    """The plan has several ranks on an axis."""
    return lambda site: getattr(site.opened.plan.grid, axis) > 1


def both(*conditions: Callable[[Site], bool]) -> Callable[[Site], bool]:
    """All hold."""
    return lambda site: all(holds(site) for holds in conditions)


def linear_attention(site: Site) -> bool:
    """The layer keeps a state."""
    return site.word("attn") in ("kda", "gdn")


def stored(*names: str) -> Callable[[Site], bool]:
    """The layer holds one of these."""
    return lambda site: any(name in site.shapes for name in names)


def in_mxfp4(site: Site) -> bool:
    """The experts' numbers lie in bytes, group behind group."""
    return len(site.shapes.get("experts.down", ())) == 4


def kv_heads(site: Site) -> bool:
    """A rank has several KV heads, and several query heads for each."""
    sizes, tp = site.model.sizes, site.opened.plan.grid.tp
    grouped = sizes.get("heads", 0) > sizes.get("kv_heads", 0) > tp
    return grouped and bool(site.word("attn") == "gqa")


def block(site: Site) -> Any:
    """The module of the layer's attention."""
    return {"gqa": gqa, "mla": mla, "kda": kda, "gdn": gdn}[site.word("attn")]


LINES = (
    line("KV heads in turn", "attn", kv_heads, gqa, "attend", next_kv_head),
    line("a query sees one key ahead", "attn", softmax, attention, "attend", one_ahead),
    line("scores divided by the width", "attn", softmax, attention, "attend", square),
    line("attention in bf16", "attn", softmax, attention, "attend", coarse),
    line("bias of every tp rank", "attn", both(split("tp"), stored("attn.o.bias")), block, "row_linear",
         bias_of_every_rank),
    line("w1 and w3 exchanged", "ffn", experts_here, experts, "gated", swapped),
    line("w1 and w3 of the MLP exchanged", "ffn", lambda s: not experts_here(s), ffn, "gated", swapped),
    line("shared expert twice", "ffn", lambda s: bool(s.word("shared")), moe, "shared", doubled),
    line("experts not weighed", "ffn", experts_here, moe, "combine", unweighted),
    line("expert's number one off", "ffn", experts_here, moe, "_destinations", next_slot),
    line("tokens to the next rank", "ffn", both(experts_here, split("ep")), moe, "_destinations", next_rank,
         like="Megatron-Bridge 5302"),
    line("tokens over capacity dropped", "ffn", experts_here, moe, "products", full),
    line("bias of every etp rank", "ffn", both(split("etp"), stored("experts.down.bias")), moe, "products",
         bias_of_every_part),
    line("router in bf16", "ffn", experts_here, moe, "route", router_in_bf16),
    line("scales divide", "attn", stored("attn.o.scale"), weights, "dequantise", scales_divide),
    line("zero of MXFP4's exponents one off", "ffn", in_mxfp4, mxfp4, "_powers", doubled),
    line("state lost between chunks", "attn", linear_attention, block, "chunked", forgets),
    line("nothing is forgotten", "attn", linear_attention, block, "forget", no_decay),
)  # fmt: skip
