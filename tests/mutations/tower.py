"""Bugs of the vision tower's blocks and norms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional

from runtime.blocks import vision
from runtime.blocks.context import RankContext
from tests.mutations.bug import SEEN, Bug, Site
from tests.mutations.looking import kind, module, of, of_site, replace_in_block, replace_in_tower, seen
from tests.mutations.patches import MOON, nothing

Right = Callable[..., Tensor]


def other_pairs(right: Right, style: str, *rest: Any) -> Tensor:
    """Halves for pairs, pairs for halves."""
    return right("half" if style == "interleaved" else "interleaved", *rest)


def square(right: Right, q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Any) -> Tensor:
    """Divided by the width, not by its root."""
    return right(q, k, v, scale / q.shape[-1] ** 0.5, mask)


def first_key_lost(right: Right, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    """An image's first patch isn't seen."""
    return right(q, k[1:], v[1:], *rest)


def by_head(right: Right, ctx: Any, weights: Any, role: str, x: Tensor) -> Tensor:
    """Queries, keys and values head by head."""
    y = right(ctx, weights, role, x)
    return y.view(len(y), -1, 3, y.shape[1] // 6).transpose(1, 2).flatten(1) if role.endswith(".qkv") else y


def across(lengths_of: Callable[[Sequence[int]], list[int]]) -> Any:
    """Attention of the site's block over other stretches of patches."""

    def make(site: Site) -> Any:
        def wrong(
            right: Right, ctx: Any, heads: int, weights: Any, name: str, x: Tensor, lengths: Sequence[int], *rest: Any
        ) -> Tensor:  # fmt: skip
            here = name == f"vision.{site.block}"
            return right(ctx, heads, weights, name, x, lengths_of(lengths) if here else lengths, *rest)

        return wrong

    return of_site(make)


def role_of(change: Callable[..., Any], *roles: str) -> Any:
    """A change of what is computed for these roles of the site's block."""

    def make(site: Site) -> Any:
        wanted = {f"vision.{role.format(block=site.block)}" for role in roles}

        def wrong(right: Right, ctx: Any, weights: Any, role: str, x: Tensor, *rest: Any) -> Tensor:
            return (
                change(right, ctx, weights, role, x, *rest) if role in wanted else right(ctx, weights, role, x, *rest)
            )

        return wrong

    return of_site(make)


def untouched(right: Right, ctx: Any, weights: Any, role: str, x: Tensor, *rest: Any) -> Tensor:
    """What came in."""
    return x


def ten_eps(right: Right, ctx: Any, weights: Any, role: str, x: Tensor, eps: float) -> Tensor:
    """Ten times the eps, or the text's where that is nothing."""
    return right(ctx, weights, role, x, max(10 * eps, 1e-5))


def relu(right: Right, ctx: Any, weights: Any, role: str, x: Tensor) -> Tensor:
    """What follows is no GELU: negative numbers are cut off."""
    return functional.relu(right(ctx, weights, role, x))


def other_gelu(site: Site) -> Any:
    """Exact for tanh, tanh for exact, in every block."""

    def wrong(right: Right, x: Tensor, approximate: str = "none") -> Tensor:
        inner = x.shape[-1] == site.model.sizes["vt_ffn"]
        other = "none" if approximate == "tanh" else "tanh"
        return right(x, approximate=other if inner else approximate)

    return wrong


def in_attention(name: str, fits: Any, attribute: str, wrong: Any) -> Bug:
    """A bug of one block's attention."""

    def inject(site: Site) -> None:
        replace_in_block(site, vision, attribute, wrong)

    return Bug(name, SEEN, fits, inject, images=True, names=lambda site: f"the tower's block {site.block}, attn")


def left_out(site: Site) -> None:
    """The last block isn't run."""

    def wrong(right: Callable[..., int], ctx: Any, name: str) -> int:
        return right(ctx, name) - (name == "vt_count")

    replace_in_tower(site.patch, RankContext, "size", wrong)


def norm_name(site: Site) -> Any:
    """The function that computes the tower's norms."""
    return "weighted_norm" if kind(site) == "moonvit3d" else "biased_norm"


def norms(name: str, fits: Any, change: Any, role: str, names: str, compute: str = "float32") -> Bug:
    """A bug of one norm."""

    def inject(site: Site) -> None:
        seen(name, fits, module, norm_name(site), role_of(change, role), names).inject(site)

    return Bug(
        name, SEEN, fits, inject, compute, images=True, names=lambda site: names.format(block=site.block)
    )  # fmt: skip


ATTN, FFN = "the tower's block {block}, attn", "the tower's block {block}, ffn"
TOWER = (
    in_attention("2-D RoPE in the other pairs", of(), "rotate", other_pairs),
    in_attention("a block's scores divided by the width", of(), "attend", square),
    in_attention("a block doesn't see the first patch", of(), "attend", first_key_lost),
    seen("attention across images", of(), module, "attention", across(lambda lengths: [sum(lengths)]), ATTN),
    seen("images' ends one patch off", of(), module, "attention",
         across(lambda lengths: [lengths[0] - 1, *lengths[1:-1], lengths[-1] + 1]), ATTN),
    in_attention("heads' q, k and v side by side", of("moonvit", "qwen3_vl"), "column_linear", by_head),
    seen("a block adds no attention", of(), lambda site: vision, "column_linear",
         role_of(nothing, "{block}.o"), ATTN),
    seen("a block adds no MLP", of(), module, "column_linear", role_of(nothing, "{block}.fc1"), FFN),
    seen("ReLU before a block's GELU", of(), module, "column_linear", role_of(relu, "{block}.fc0"), FFN),
    seen("the tower's other GELU", of(), lambda site: functional, "gelu", of_site(other_gelu),
         "the tower's block 0, ffn", "float64"),
    Bug("last block left out", SEEN, of(), left_out, images=True,
        names=lambda site: rf"vision\.{site.model.sizes['vt_count'] - 1}\."),
    norms("a block's norm left out", of(), untouched, "{block}.norm0", r"vision\.{block}\.norm0"),
    norms("a block's eps ten times", of(), ten_eps, "{block}.norm0", ATTN, "float64"),
    norms("a block's second eps ten times", of(), ten_eps, "{block}.norm1", FFN, "float64"),
    norms("the tower's last norm left out", of(*MOON), untouched, "norm", r"vision\.norm"),
    norms("the tower's first norm left out", of("clip"), untouched, "pre_norm", r"vision\.pre_norm"),
    norms("the last norm's eps ten times", of(*MOON), ten_eps, "norm", "the tower's norm", "float64"),
)  # fmt: skip
