"""Bugs of what merges patches and projects them to the text's width, of deep features, and of the tower's weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from runtime.blocks import clip, projector, qwen_vision, vision
from runtime.blocks.context import RankContext
from runtime.blocks.images import Images
from runtime.blocks.linear import column_linear
from runtime.blocks.weights import dense, optional
from tests.mutations import edits
from tests.mutations.bug import SEEN, Bug, Site
from tests.mutations.edits import Edit
from tests.mutations.looking import enter_tower, kind, of, of_site, replace_in_tower, seen
from tests.mutations.patches import MOON, PATCHES
from tests.mutations.tower import ATTN, FFN, role_of, ten_eps, untouched
from tests.mutations.weights import in_files

Right = Callable[..., Tensor]
MERGE, PROJECTOR_, DEEP = "the tower's merge", "the tower's projector", r"the tower's deep \d"


def turned_square(right: Right, tower: Any, x: Tensor, images: Images) -> Tensor:
    """Neighbours of a square column by column."""
    y = right(tower, x, images)
    return y.view(len(y), *tower.merge, -1).transpose(1, 2).reshape(y.shape)


def in_line(right: Right, tower: Any, x: Tensor, images: Images) -> Tensor:
    """Four patches of a row become a token, not a square of them."""
    flat, start = [], 0
    for frames, rows, columns in images.grids:
        image = x[start : start + frames * rows * columns].view(frames, rows * columns, -1)
        start += frames * rows * columns
        flat.append(image.mean(0).view(-1, tower.merge[0] * tower.merge[1] * x.shape[1]))
    return torch.cat(flat)


def first_frame(right: Right, tower: Any, x: Tensor, images: Images) -> Tensor:
    """The first frame stands for all."""
    parts, start = [], 0
    for frames, rows, columns in images.grids:
        image = x[start : start + frames * rows * columns].view(frames, rows * columns, -1)
        start += frames * rows * columns
        parts.append(image[:1].expand(frames, -1, -1).flatten(0, 1))
    return right(tower, torch.cat(parts), images)


def turned_input(site: Site) -> Any:
    """The same squares, before a projector that merges."""

    def wrong(right: Right, ctx: Any, tower_or_weights: Any, *rest: Any) -> Tensor:
        x = rest[-1]
        if kind(site) == "clip" and rest[0] != "vision.merge0":
            return right(ctx, tower_or_weights, *rest)
        square = x.view(len(x), 2, 2, -1).transpose(1, 2).reshape(x.shape)
        return right(ctx, tower_or_weights, *rest[:-1], square)

    return wrong


def tanh_gelu(site: Site) -> Any:
    """Tanh for exact, but not in blocks."""

    def wrong(right: Right, x: Tensor, approximate: str = "none") -> Tensor:
        return right(x, approximate=approximate if x.shape[-1] == site.model.sizes["vt_ffn"] else "tanh")

    return wrong


def bias_of_every_rank(right: Right, ctx: RankContext, weights: Any, role: str, x: Tensor) -> Tensor:
    """Each tp rank adds the bias."""
    bias = optional(weights, f"{role}.bias")
    y = right(ctx, weights, role, x)
    return y if bias is None else y + (ctx.grid.tp - 1) * dense(bias, ctx.compute)


def no_gelu(right: Right, ctx: Any, weights: Any, first: str, second: str, x: Tensor) -> Tensor:
    """Two products and nothing between them."""
    return column_linear(ctx, weights, second, column_linear(ctx, weights, first, x))


def holds(fits: Callable[[Site], bool], *roles: str) -> Callable[[Site], bool]:
    """The rank has one of these weights."""
    return lambda site: fits(site) and any(role.format(block=site.block) in site.shapes for role in roles)


def projector_norm(name: str, change: Any, names: str, compute: str = "float32") -> Bug:
    """A bug of the projector's norm."""

    def inject(site: Site) -> None:
        attribute = "weighted_norm" if kind(site) == "moonvit3d" else "biased_norm"
        seen(name, of(), lambda site: projector, attribute, role_of(change, "merge_norm"), names).inject(site)

    return Bug(name, SEEN, holds(of(), "vision.merge_norm"), inject, compute, images=True, names=lambda site: names)


def other_order(site: Site) -> None:
    """Features of blocks in the other order."""

    def wrong(right: Callable[..., Any], ctx: RankContext, *rest: Any) -> Any:
        config = ctx.model.config
        found = config["vision_config"]["deepstack_visual_indexes"]
        seen_by = {**config["vision_config"], "deepstack_visual_indexes": found[::-1]}
        return right(replace(ctx, model=replace(ctx.model, config={**config, "vision_config": seen_by})), *rest)

    replace_in_tower(site.patch, qwen_vision, "look", wrong)


def deepstack(site: Site) -> bool:
    """The tower has features for early layers."""
    return of("qwen3_vl")(site) and site.model.sizes.get("deepstack", 0) > 1


def neighbour_block(site: Site) -> None:
    """A block has another one's matrices."""
    count, here = site.model.sizes["vt_count"], f"vision.{site.block}."
    other = f"vision.{(site.block + 1) % count}."

    def change(ctx: RankContext, weights: dict[str, Any]) -> dict[str, Any]:
        taken = {role: weights[role.replace(here, other)] for role in weights if role.startswith(here + "fc")}
        return weights | taken

    enter_tower(site.patch, change)


def stored(name: str, edit: Edit, names: str, *roles: str) -> Bug:
    """An edit of one weight of the tower: in the file of one rank, or in its memory."""

    def inject(site: Site) -> None:
        found = [role.format(block=site.block) for role in roles]
        role = site.dice.choice([role for role in found if role in site.shapes])
        seed = site.dice.random()

        def change(x: Tensor) -> Tensor:
            site.dice.seed(seed)
            return edit(site, x)

        def spoil(ctx: RankContext, weights: dict[str, Any]) -> dict[str, Any]:
            if ctx.at.rank == site.rank:
                weights[role] = replace(weights[role], values=change(weights[role].values))
            return weights

        if site.dice.random() < 0.5:
            in_files(site, [role], change)
        else:
            enter_tower(site.patch, spoil)

    return Bug(
        name, SEEN, holds(of(), *roles), inject, images=True, names=lambda site: names.format(block=site.block)
    )  # fmt: skip


def off(site: Site, x: Tensor) -> Tensor:
    """1 % off; the tower's norms aren't centred."""
    return (x.float() * 1.01).to(x.dtype)


ATTENTION = tuple(f"vision.{{block}}.{role}" for role in ("qkv", "q", "k", "v", "o"))
MLP = ("vision.{block}.fc0", "vision.{block}.fc1")
OUT = ("vision.merge0", "vision.merge2")
PROJECTOR = (
    seen("squares column by column", of(*MOON), lambda site: vision, "merge", turned_square, MERGE),
    seen("four in a row for a square", of(*MOON), lambda site: vision, "merge", in_line, MERGE),
    seen("the first frame for the mean", of(*MOON), lambda site: vision, "merge", first_frame, MERGE),
    seen("squares turned before the projector", of("qwen3_vl"), lambda site: qwen_vision, "project",
         of_site(turned_input), PROJECTOR_),
    seen("squares turned before the merger", of("clip"), lambda site: clip, "perceptron", of_site(turned_input), MERGE),
    projector_norm("the projector's eps ten times", ten_eps, PROJECTOR_, "float64"),
    projector_norm("the projector's norm left out", untouched, r"vision\.merge_norm"),
    seen("tanh GELU in the projector", of(), lambda site: functional, "gelu", of_site(tanh_gelu),
         f"{PROJECTOR_}|{DEEP}", "float64"),
    seen("no GELU in the projector", of("moonvit", "moonvit3d", "clip"),
         lambda site: clip if kind(site) == "clip" else projector, "perceptron", no_gelu, PROJECTOR_),
    seen("the projector's bias of every tp rank", holds(of(), "vision.merge2.bias"), lambda site: projector,
         "column_linear", role_of(bias_of_every_rank, "merge2"), f"{PROJECTOR_}|{MERGE}"),
    Bug("deep features in the other order", SEEN, deepstack, other_order, images=True, names=lambda site: DEEP),
    seen("no GELU in a deep merger", deepstack, lambda site: qwen_vision, "perceptron", no_gelu, DEEP),
    Bug("MLP of another block", SEEN, of(), neighbour_block, images=True,
        names=lambda site: FFN.format(block=site.block)),
    stored("the tower's rows one off", edits.next_row, ATTN, *ATTENTION),
    stored("the tower's MLP rows one off", edits.next_row, FFN, *MLP),
    stored("the tower's strided slice", edits.strided, FFN, *MLP),
    stored("the tower's norm 1 % off", off, ATTN, "vision.{block}.norm0"),
    stored("the tower's bias lost", edits.zero, ATTN, "vision.{block}.qkv.bias", "vision.{block}.o.bias"),
    stored("the tower's table 1 % off", off, "the tower's positions", "vision.pos"),
    stored("the patches' bias lost", edits.zero, PATCHES, "vision.patch.bias"),
    stored("the projector's rows one off", edits.next_row, f"{PROJECTOR_}|{MERGE}", *OUT),
    stored("the projector's norm 1 % off", off, PROJECTOR_, "vision.merge_norm"),
    stored("a deep merger's rows one off", edits.next_row, DEEP, "vision.0.deep0", "vision.1.deep2"),
)  # fmt: skip
