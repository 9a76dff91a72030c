"""Changes of one stored tensor, as a converter or a loader gets them wrong. Each takes the site and the tensor."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.mutations.bug import Site

Edit = Callable[[Site, Tensor], Tensor]


def zero(site: Site, x: Tensor) -> Tensor:
    """Lost altogether."""
    return torch.zeros_like(x)


def ones(site: Site, x: Tensor) -> Tensor:
    """A norm that was left out; centred norms add 1 themselves."""
    return torch.zeros_like(x) if site.model.words["norm"] == "rms_zero_centred" else torch.ones_like(x)


def off(site: Site, x: Tensor) -> Tensor:
    """1 % off. Of bf16 numbers no other than their neighbours but one lie so near."""
    centred = site.model.words["norm"] == "rms_zero_centred"
    return (x.float() + 0.01 if centred else x.float() * 1.01).to(x.dtype)


def rounded(site: Site, x: Tensor) -> Tensor:
    """As bf16 keeps it."""
    return x.bfloat16().to(x.dtype)


def not_a_number(site: Site, x: Tensor) -> Tensor:
    """One element is none."""
    flat = x.clone().flatten()
    flat[site.dice.randrange(len(flat))] = float("nan")
    return flat.view(x.shape)


def exchange(x: Tensor, dim: int, width: int, first: int, second: int) -> Tensor:
    """Two stretches of `width` along `dim` in one another's place."""
    order = torch.arange(x.shape[dim])
    one, other = (torch.arange(number * width, (number + 1) * width) for number in (first, second))
    order[one], order[other] = other, one
    return x.index_select(dim, order)


def pick(site: Site, count: int) -> tuple[int, int]:
    """Two different numbers below `count`."""
    first, second = site.dice.sample(range(count), 2)
    return first, second


def exchange_experts(site: Site, x: Tensor) -> Tensor:
    """Two experts in one another's place."""
    return exchange(x, 0, 1, *pick(site, len(x)))


def next_expert(site: Site, x: Tensor) -> Tensor:
    """Every expert is the one behind it."""
    return x.roll(-1, 0)


def half_of_each(site: Site, x: Tensor) -> Tensor:
    """The second half of every expert's rows never arrived."""
    x = x.clone()
    x[:, x.shape[1] // 2 :] = 0
    return x


def gate_for_up(site: Site, x: Tensor) -> Tensor:
    """Gate and up exchanged: halves, or neighbours where they come in pairs."""
    if site.word("expert_pairs") == "interleaved" and x.dim() > 2:
        return x.reshape(len(x), -1, 2, *x.shape[2:]).flip(2).flatten(1, 2)
    dim = 1 if x.dim() > 2 else 0
    return x.roll(x.shape[dim] // 2, dim)


def pairs_for_halves(site: Site, x: Tensor) -> Tensor:
    """Rows of gate and up in turn where halves are read, or the other way round."""
    dim = 1 if x.dim() > 2 else 0
    paired = site.word("expert_pairs") == "interleaved" and dim == 1
    split = x.reshape(*x.shape[:dim], *((-1, 2) if paired else (2, x.shape[dim] // 2)), *x.shape[dim + 1 :])
    return split.transpose(dim, dim + 1).flatten(dim, dim + 1)


def head_rows(site: Site) -> tuple[int, int]:
    """Query heads of one rank, and the rows of each."""
    sizes, tp = site.model.sizes, site.opened.plan.grid.tp
    if site.word("attn") == "gqa":
        return sizes["heads"] // tp, sizes["head_dim"] * (2 if site.word("output_gate") else 1)
    if site.word("attn") == "mla":
        return sizes["heads"] // tp, sizes["nope"] + sizes["rope"]
    if site.word("attn") == "gdn":
        return sizes["key_heads"] * sizes["per_key"] // tp, sizes["dv"]
    return sizes["kda_heads"] // tp, sizes["kda_dim"]


def exchange_heads(site: Site, x: Tensor) -> Tensor:
    """The rows of two query heads in one another's place."""
    heads, width = head_rows(site)
    return exchange(x, 0, width, *pick(site, heads))


def exchange_outputs(site: Site, x: Tensor) -> Tensor:
    """What the output takes of two heads in one another's place: columns."""
    heads = head_rows(site)[0]
    return exchange(x, 1, x.shape[1] // heads, *pick(site, heads))


def key_for_value(site: Site, x: Tensor) -> Tensor:
    """Keys and values exchanged."""
    heads, width = head_rows(site)
    queries, rest = x[: heads * width], x[heads * width :]
    return torch.cat([queries, rest.roll(len(rest) // 2, 0)])


def strided(site: Site, x: Tensor) -> Tensor:
    """Every other row first, then the rest, as when a strided slice is saved as if it lay in one piece."""
    return torch.cat([x[0::2], x[1::2]])


def turned(site: Site, x: Tensor) -> Tensor:
    """Rows for columns; shapes are alike."""
    return x.transpose(-1, -2).contiguous()


def next_row(site: Site, x: Tensor) -> Tensor:
    """Rows one off: an offset that was rounded up."""
    return x.roll(1, -2 if x.dim() > 1 else 0)


def next_element(site: Site, x: Tensor) -> Tensor:
    """All but the place is right."""
    return x.roll(1, 0)


def first_block(site: Site, x: Tensor) -> Tensor:
    """Scales not cut along the columns: every rank has those of the first block."""
    return x[..., :1].expand(x.shape).clone()


def next_block(site: Site, x: Tensor) -> Tensor:
    """Scales of the block beside."""
    return x.roll(1, -1)


def nibbles(site: Site, x: Tensor) -> Tensor:
    """The two numbers of a byte exchanged."""
    return (x >> 4) | (x << 4)


def lost_rows(site: Site, x: Tensor) -> Tensor:
    """16 rows lost."""
    x, start = x.clone(), site.dice.randrange(len(x) - 16)
    x[start : start + 16] = 0
    return x


def reversed_taps(site: Site, x: Tensor) -> Tensor:
    """The short convolution backwards in time."""
    return x.flip(-1)


def by_kind(site: Site, x: Tensor) -> Tensor:
    """Rows by kind, not by key head: all of the first kind, then all of the next."""
    heads = site.model.sizes["key_heads"] // site.opened.plan.grid.tp
    per_key, dk, dv = (site.model.sizes[name] for name in ("per_key", "dk", "dv"))
    sizes = [per_key, per_key] if len(x) == heads * 2 * per_key else [dk, dk, per_key * dv, per_key * dv]
    return torch.cat([part.flatten(0, 1) for part in torch.split(x.reshape(heads, -1, *x.shape[1:]), sizes, dim=1)])
