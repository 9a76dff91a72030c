"""Bugs of the vision tower before its blocks: patches, learned positions, RoPE's angles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from runtime.blocks import vision
from runtime.blocks.images import Images
from tests.mutations.bug import Site
from tests.mutations.looking import kind, module, of, of_site, seen

Right = Callable[..., Tensor]
FLAT = ("qwen3_vl", "clip")
MOON = ("moonvit", "moonvit3d")


def pixels_of(images: Images, weights: Any) -> Tensor:
    """Pixels [patches, channels, frames, rows, columns]."""
    shape = weights["vision.patch"].values.shape
    shape = shape if len(shape) == 5 else (shape[0], 3, 1, *shape[2:])
    return images.pixels.view(-1, *shape[1:])


def in_order(*order: int) -> Any:
    """The patches' axes (channels 1, frames 2, rows 3, columns 4) in another order."""

    def wrong(right: Right, ctx: Any, weights: Any, images: Images) -> Tensor:
        moved = pixels_of(images, weights).permute(0, *order)
        return right(ctx, weights, Images(moved.reshape(images.pixels.shape), images.grids))

    return wrong


def flipped(right: Right, ctx: Any, weights: Any, images: Images) -> Tensor:
    """The two frames of a patch exchanged."""
    moved = pixels_of(images, weights).flip(2)
    return right(ctx, weights, Images(moved.reshape(images.pixels.shape), images.grids))


def two_patches(right: Right, *given: Any) -> Tensor:
    """The first two patches exchanged."""
    x = right(*given)
    return torch.cat([x[1:2], x[:1], x[2:]])


def nothing(right: Right, *given: Any, **named: Any) -> Tensor:
    """Nothing."""
    return torch.zeros_like(right(*given, **named))


def other_corners(right: Right, table: Tensor, rows: int, columns: int, mode: str, corners: bool) -> Tensor:
    """The other rule for corners."""
    return right(table, rows, columns, mode, not corners)


def other_curve(right: Right, table: Tensor, rows: int, columns: int, mode: str, corners: bool) -> Tensor:
    """Linear for cubic, cubic for linear."""
    return right(table, rows, columns, "bilinear" if mode == "bicubic" else "bicubic", corners)


def transposed(right: Right, table: Tensor, *rest: Any, **named: Any) -> Tensor:
    """Height and width of the table exchanged."""
    return right(table.transpose(0, 1), *rest, **named)


def corners_in_place(right: Right, table: Tensor, count: int, axis: int) -> Tensor:
    """MoonViT3d's: corners stay in place."""
    rows, columns = (count, table.shape[1]) if axis == 0 else (table.shape[0], count)
    return vision.resize(table, rows, columns, "bilinear", corners=True)


def transposed_once(right: Right, table: Tensor, count: int, axis: int) -> Tensor:
    """MoonViT3d's: height and width exchanged."""
    return right(table.transpose(0, 1) if axis == 0 else table, count, axis)


def row_after_row(right: Right, tower: Any, x: Tensor) -> Tensor:
    """Not square after square."""
    return x.flatten(0, 1)


def rolled(right: Right, *given: Any) -> Tensor:
    """Frames count from one."""
    return right(given[0] + 1, *given[1:])[1:]


def axes_exchanged(site: Site) -> Any:
    """Rows turn what columns should."""

    def swap(x: Tensor) -> Tensor:
        if kind(site) in MOON:
            return x.view(len(x), -1, 2).flip(-1).reshape(x.shape)
        parts = list(x.chunk(3 if kind(site) == "clip" else 2, dim=-1))
        return torch.cat([*parts[:-2], parts[-1], parts[-2]], dim=-1)

    def wrong(right: Callable[..., tuple[Tensor, Tensor]], *given: Any) -> tuple[Tensor, Tensor]:
        cos, sin = right(*given)
        return swap(cos), swap(sin)

    return wrong


def unturned(right: Callable[..., tuple[Tensor, Tensor]], *given: Any) -> tuple[Tensor, Tensor]:
    """No RoPE."""
    cos, sin = right(*given)
    return torch.ones_like(cos), torch.zeros_like(sin)


PATCHES, POSITIONS, TURNS = "the tower's patches", "the tower's positions", "the tower's turns"
SIGHT = (
    seen("a patch's channels last", of(), module, "cut_patches", in_order(2, 3, 4, 1), PATCHES),
    seen("a patch's rows and columns exchanged", of(), module, "cut_patches", in_order(1, 2, 4, 3), PATCHES),
    seen("a patch's frames before its channels", of(*FLAT), module, "cut_patches", in_order(2, 1, 3, 4), PATCHES),
    seen("a patch's frames exchanged", of(*FLAT), module, "cut_patches", flipped, PATCHES),
    seen("two patches exchanged", of(), module, "cut_patches", two_patches, PATCHES),
    seen("learned positions left out", of("moonvit", "qwen3_vl"), module, "resize", nothing, POSITIONS),
    seen("positions with the other corners", of("moonvit", "qwen3_vl"), module, "resize", other_corners, POSITIONS),
    seen("positions linear for cubic, and back", of("moonvit", "qwen3_vl"), module, "resize", other_curve, POSITIONS),
    seen("positions' height and width exchanged", of("moonvit", "qwen3_vl"), module, "resize", transposed, POSITIONS),
    seen("MoonViT3d's positions left out", of("moonvit3d"), module, "stretch", nothing, POSITIONS),
    seen("MoonViT3d's corners in place", of("moonvit3d"), module, "stretch", corners_in_place, POSITIONS),
    seen("MoonViT3d's height and width exchanged", of("moonvit3d"), module, "stretch", transposed_once, POSITIONS),
    seen("positions row after row", of("qwen3_vl"), module, "in_squares", row_after_row, POSITIONS),
    seen("RoPE row after row", of("clip"), module, "in_squares", row_after_row, TURNS),
    seen("frames' sines left out", of(*MOON), module, "frame_table", nothing, POSITIONS),
    seen("frames counted from one", of(*MOON), module, "frame_table", rolled, POSITIONS),
    seen("2-D RoPE's rows and columns exchanged", of(), module, "turns", of_site(axes_exchanged), TURNS),
    seen("2-D RoPE left out", of(), module, "turns", unturned, TURNS),
)
