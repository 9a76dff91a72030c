"""The vision tower of Qwen3-VL: patches to tokens, and features of inner blocks that are added behind early layers.

A patch is two frames of 16 x 16 points, one product. Positions: a learned square table, stretched linearly with its
corners in place; then 2-D RoPE in every block, rows in the first half of the pairs, columns in the second. Patches come
square after square of those that become one token.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from runtime.blocks.context import RankContext
from runtime.blocks.images import Images, Tower
from runtime.blocks.linear import column_linear
from runtime.blocks.norms import biased_norm
from runtime.blocks.probe import NOBODY, Looker
from runtime.blocks.projector import perceptron, project
from runtime.blocks.vision import BASE, attention, cut_patches, resize, turned
from runtime.blocks.weights import LayerWeights, dense, take
from shard_plans.errors import RuntimeFault


def look(
    ctx: RankContext, tower: Tower, weights: LayerWeights, images: Images, looker: Looker = NOBODY
) -> tuple[Tensor, Tensor | None]:
    """The tokens of `images` [tokens, hidden], and the features of inner blocks [blocks, tokens, hidden]."""
    inner = ctx.model.config["vision_config"].get("deepstack_visual_indexes") or []
    merged = tower.merge[0] * tower.merge[1]
    x, turn = embed_patches(ctx, tower, weights, images, looker), turned(looker, turns(ctx, tower, images))
    lengths = [rows * columns for frames, rows, columns in images.grids for _ in range(frames)]
    deep = []
    for block in range(ctx.size("vt_count")):
        name = f"vision.{block}"
        h = biased_norm(ctx, weights, f"{name}.norm0", x, tower.eps)
        y = attention(ctx, tower.heads, weights, name, h, lengths, turn, "half")
        x = x + looker.made(f"block {block}, attn", y)
        h = biased_norm(ctx, weights, f"{name}.norm1", x, tower.eps)
        h = functional.gelu(column_linear(ctx, weights, f"{name}.fc0", h), approximate="tanh")
        x = x + looker.made(f"block {block}, ffn", column_linear(ctx, weights, f"{name}.fc1", h))
        if block in inner:
            number = inner.index(block)
            h = biased_norm(ctx, weights, f"vision.{number}.deep_norm", x.view(-1, merged * x.shape[1]), tower.eps)
            h = perceptron(ctx, weights, f"vision.{number}.deep0", f"vision.{number}.deep2", h)
            deep.append(looker.made(f"deep {number}", h))
    tokens = project(ctx, tower, weights, x.view(-1, merged * x.shape[1]))
    return looker.made("projector", tokens), torch.stack(deep) if deep else None


def embed_patches(
    ctx: RankContext, tower: Tower, weights: LayerWeights, images: Images, looker: Looker = NOBODY
) -> Tensor:  # fmt: skip
    """Patches and their positions in the image: [patches, vt]."""
    table = dense(take(weights, "vision.pos"), ctx.compute)
    side = round(len(table) ** 0.5)
    if side * side != len(table):
        raise RuntimeFault(f"vision.pos has {len(table)} places, which make no square")
    table, parts = table.view(side, side, -1), []
    for frames, rows, columns in images.grids:
        flat = in_squares(tower, resize(table, rows, columns, "bilinear", corners=True))
        parts.append(flat.repeat(frames, 1))
    return looker.made("patches", cut_patches(ctx, weights, images)) + looker.made("positions", torch.cat(parts))


def turns(ctx: RankContext, tower: Tower, images: Images) -> tuple[Tensor, Tensor]:
    """Cosine and sine [patches, width / 2] of RoPE: rows turn the first quarter of pairs, columns the second."""
    wide, width = ctx.accumulate(), ctx.size("vt") // tower.heads
    inverse = BASE ** -(torch.arange(0, width // 2, 2, device=ctx.device).to(wide) / (width // 2))
    parts = []
    for frames, rows, columns in images.grids:
        y = torch.arange(rows, device=ctx.device).to(wide)[:, None, None] * inverse
        x = torch.arange(columns, device=ctx.device).to(wide)[None, :, None] * inverse
        both = torch.cat([y.expand(-1, columns, -1), x.expand(rows, -1, -1)], dim=-1)
        parts.append(in_squares(tower, both).repeat(frames, 1))
    angles = torch.cat(parts)
    return angles.cos(), angles.sin()


def in_squares(tower: Tower, x: Tensor) -> Tensor:
    """Places of one frame [rows, columns, ..], in the order in which patches come: [rows * columns, ..]."""
    high, across = tower.merge
    rows, columns = x.shape[:2]
    return x.view(rows // high, high, columns // across, across, -1).transpose(1, 2).reshape(rows * columns, -1)
