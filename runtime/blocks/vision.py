"""The vision towers MoonViT and MoonViT3d: patches of images to tokens. Every rank of the first stage holds it whole.

The patch projection is a 14 x 14 convolution with that stride, hence one product a patch. Positions: a learned table,
stretched over each image, and between frames sines and cosines; then 2-D RoPE in every block. MoonViT (Kimi K2.5) has
LayerNorms and biases, and stretches with cubics; MoonViT3d (Kimi K3) RMSNorms without, and stretches linearly.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from runtime.blocks.attention import attend
from runtime.blocks.context import RankContext
from runtime.blocks.images import Images, Tower
from runtime.blocks.linear import check_inner, column_linear
from runtime.blocks.norms import biased_norm, weighted_norm
from runtime.blocks.probe import NOBODY, Looker
from runtime.blocks.projector import project
from runtime.blocks.rope import rotate
from runtime.blocks.weights import LayerWeights, dense, optional, take

BASE = 10000.0
"""Of RoPE's frequencies and of the frames' ones."""
LAYER_EPS = 1e-5
"""Of MoonViT's own norms."""


def look(
    ctx: RankContext, tower: Tower, weights: LayerWeights, images: Images, looker: Looker = NOBODY
) -> Tensor:  # fmt: skip
    """The tokens of `images`, in order: [tokens, hidden] in the compute dtype."""
    patches = look_at_patches(ctx, tower, weights, images, looker)
    merged = looker.made("merge", merge(tower, patches, images))
    return looker.made("projector", project(ctx, tower, weights, merged))


def look_at_patches(
    ctx: RankContext, tower: Tower, weights: LayerWeights, images: Images, looker: Looker = NOBODY
) -> Tensor:  # fmt: skip
    """Patches through all blocks and the last norm: [patches, vt]."""
    wide = ctx.accumulate()
    x = embed_patches(ctx, tower, weights, images, looker)
    width = ctx.model.sizes.get("vt_qkv", ctx.size("vt")) // tower.heads
    turn = turned(looker, turns(images, width, wide, ctx.device))
    lengths = [frames * rows * columns for frames, rows, columns in images.grids]
    for block in range(ctx.size("vt_count")):
        name = f"vision.{block}"
        h = _norm(ctx, tower, weights, f"{name}.norm0", x)
        x = x + looker.made(f"block {block}, attn", attention(ctx, tower.heads, weights, name, h, lengths, turn))
        h = _norm(ctx, tower, weights, f"{name}.norm1", x)
        h = functional.gelu(column_linear(ctx, weights, f"{name}.fc0", h), approximate="tanh")
        x = x + looker.made(f"block {block}, ffn", column_linear(ctx, weights, f"{name}.fc1", h))
    return looker.made("norm", _norm(ctx, tower, weights, "vision.norm", x))


def _norm(ctx: RankContext, tower: Tower, weights: LayerWeights, role: str, x: Tensor) -> Tensor:
    if tower.kind == "moonvit":
        return biased_norm(ctx, weights, role, x, LAYER_EPS)
    # A norm without an eps takes the machine epsilon of what it accumulates in (torch from 2.7 on).
    return weighted_norm(ctx, weights, role, x, torch.finfo(ctx.accumulate()).eps)


def embed_patches(
    ctx: RankContext, tower: Tower, weights: LayerWeights, images: Images, looker: Looker = NOBODY
) -> Tensor:  # fmt: skip
    """Patches and their positions in the image: [patches, vt]. Reads vision.patch, its bias if any, and vision.pos."""
    x = looker.made("patches", cut_patches(ctx, weights, images))
    table = dense(take(weights, "vision.pos"), ctx.compute)
    parts = []
    for frames, rows, columns in images.grids:
        if tower.kind == "moonvit":
            flat = resize(table, rows, columns, "bicubic", corners=False).flatten(0, 1)
        else:
            flat = stretch(stretch(table, rows, 0), columns, 1).reshape(rows * columns, -1)
        part = flat.expand(frames, -1, -1)
        if frames > 1:
            part = part + frame_table(frames, table.shape[-1], ctx.accumulate(), ctx.device)[:, None].to(ctx.compute)
        parts.append(part.reshape(-1, table.shape[-1]))
    return x + looker.made("positions", torch.cat(parts))


def turned(looker: Looker, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Cosine and sine, as the looker hands them on."""
    cos, sin = looker.made("turns", torch.cat(turn, dim=-1)).chunk(2, dim=-1)
    return cos, sin


def cut_patches(ctx: RankContext, weights: LayerWeights, images: Images) -> Tensor:
    """The product of each patch with vision.patch: [patches, vt]."""
    kernel = dense(take(weights, "vision.patch"), ctx.compute).flatten(1)
    pixels = images.pixels.to(ctx.device, ctx.compute).flatten(1)
    check_inner("vision.patch", kernel, pixels)
    bias = optional(weights, "vision.patch.bias")
    y = functional.linear(pixels, kernel, None if bias is None else dense(bias, ctx.compute))
    return ctx.pulse.saw("vision.patch", y)


def resize(table: Tensor, rows: int, columns: int, mode: str, corners: bool) -> Tensor:
    """`table` [height, width, ..] at rows x columns places, as torch's interpolate; `corners`: they stay in place."""
    wide = table.to(torch.promote_types(table.dtype, torch.float32)).permute(2, 0, 1)[None]
    found = functional.interpolate(wide, size=(rows, columns), mode=mode, align_corners=corners)
    return found[0].permute(1, 2, 0).to(table.dtype)


def stretch(table: Tensor, count: int, axis: int) -> Tensor:
    """`table` with `count` entries along `axis`, linear between neighbours; edges of cells meet, not centres."""
    length = table.shape[axis]
    if count == length:
        return table
    wide = torch.promote_types(table.dtype, torch.float32)
    at = ((torch.arange(count, device=table.device).to(wide) + 0.5) * (length / count) - 0.5).clamp_min(0)
    low = at.floor().long().clamp_max(length - 1)
    high = (low + 1).clamp_max(length - 1)
    shape = [count if dim == axis else 1 for dim in range(table.dim())]
    part = (at - low).view(shape)
    first, second = table.index_select(axis, low), table.index_select(axis, high)
    return (first.to(wide) * (1 - part) + second.to(wide) * part).to(table.dtype)


def frame_table(frames: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[frames, width]: sines, then cosines, of the frame's number."""
    powers = torch.arange(width // 2, device=device).to(dtype) / (width / 2)
    angles = torch.arange(frames, device=device).to(dtype)[:, None] / BASE**powers
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def turns(images: Images, width: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine [patches, width / 2] of RoPE: pairs of dimensions turn by column and by row in alternation."""
    inverse = BASE ** -(torch.arange(0, width, 4, device=device).to(dtype) / width)
    parts = []
    for frames, rows, columns in images.grids:
        x = torch.arange(columns, device=device).to(dtype)[None, :, None] * inverse
        y = torch.arange(rows, device=device).to(dtype)[:, None, None] * inverse
        both = torch.stack([x.expand(rows, -1, -1), y.expand(-1, columns, -1)], dim=-1)
        parts.append(both.reshape(rows * columns, width // 2).repeat(frames, 1))
    angles = torch.cat(parts)
    return angles.cos(), angles.sin()


def attention(
    ctx: RankContext,
    heads: int,
    weights: LayerWeights,
    name: str,
    x: Tensor,
    lengths: Sequence[int],
    turn: tuple[Tensor, Tensor],
    style: str = "interleaved",
) -> Tensor:
    """Every patch attends to all of its image: [patches, vt]. Reads NAME.qkv (q|k|v), or NAME.q, k, v; and NAME.o.

    `lengths` are the patches of each image, `turn` the cosine and sine of their positions, `style` how pairs lie.
    """
    if f"{name}.qkv" in weights:
        qkv = column_linear(ctx, weights, f"{name}.qkv", x)
    else:
        qkv = torch.cat([column_linear(ctx, weights, f"{name}.{role}", x) for role in "qkv"], dim=-1)
    q, k, v = qkv.view(len(x), 3, heads, -1).unbind(1)
    q, k = (rotate(style, part.to(turn[0].dtype), *turn).to(x.dtype) for part in (q, k))
    parts, scale = [], float(q.shape[-1] ** -0.5)
    start = 0
    for length in lengths:
        image = slice(start, start + length)
        parts.append(attend(q[image], k[image], v[image], scale, None))
        start += length
    return column_linear(ctx, weights, f"{name}.o", torch.cat(parts))


def merge(tower: Tower, x: Tensor, images: Images) -> Tensor:
    """Patches [patches, vt] to [tokens, merge * vt]: the mean over frames, then neighbours one behind the other."""
    high, across = tower.merge
    parts, start = [], 0
    for frames, rows, columns in images.grids:
        image = x[start : start + frames * rows * columns]
        start += len(image)
        image = image.view(frames, rows // high, high, columns // across, across, -1).mean(0).transpose(1, 2)
        parts.append(image.reshape((rows // high) * (columns // across), -1))
    return torch.cat(parts)
