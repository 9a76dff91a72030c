"""The vision tower of MiniMax-M3: like CLIP's, with RoPE by frame, row and column in the place of learned positions.

A patch is two frames of 14 x 14 points, one product. Patches come square after square of those that become one token.
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
from runtime.blocks.projector import perceptron
from runtime.blocks.qwen_vision import in_squares
from runtime.blocks.vision import BASE, attention, cut_patches, turned
from runtime.blocks.weights import LayerWeights


def look(
    ctx: RankContext, tower: Tower, weights: LayerWeights, images: Images, looker: Looker = NOBODY
) -> Tensor:  # fmt: skip
    """The tokens of `images` [tokens, hidden]: every patch to the text's width, then squares of them to one token."""
    x = looker.made("patches", cut_patches(ctx, weights, images))
    x = looker.made("norm", biased_norm(ctx, weights, "vision.pre_norm", x, tower.eps))
    turn = turned(looker, turns(ctx, tower, images))
    lengths = [frames * rows * columns for frames, rows, columns in images.grids]
    for block in range(ctx.size("vt_count")):
        name = f"vision.{block}"
        h = biased_norm(ctx, weights, f"{name}.norm0", x, tower.eps)
        y = attention(ctx, tower.heads, weights, name, h, lengths, turn, "half")
        x = x + looker.made(f"block {block}, attn", y)
        h = biased_norm(ctx, weights, f"{name}.norm1", x, tower.eps)
        h = functional.gelu(column_linear(ctx, weights, f"{name}.fc0", h))
        x = x + looker.made(f"block {block}, ffn", column_linear(ctx, weights, f"{name}.fc1", h))
    x = looker.made("projector", perceptron(ctx, weights, "vision.proj0", "vision.proj2", x))
    squares = x.view(len(x) // (tower.merge[0] * tower.merge[1]), -1)
    return looker.made("merge", perceptron(ctx, weights, "vision.merge0", "vision.merge2", squares))


def turns(ctx: RankContext, tower: Tower, images: Images) -> tuple[Tensor, Tensor]:
    """Cosine and sine [patches, 3 * axis / 2] of RoPE: frames, rows and columns turn a third of the pairs each.

    What of a head's width three equal axes of whole pairs leave over doesn't turn.
    """
    wide, width = ctx.accumulate(), ctx.size("vt") // tower.heads
    axis = 2 * (width // 3 // 2)
    inverse = BASE ** -(torch.arange(0, axis, 2, device=ctx.device).to(wide) / axis)
    parts = []
    for frames, rows, columns in images.grids:
        y = torch.arange(rows, device=ctx.device)[:, None].expand(-1, columns)
        x = torch.arange(columns, device=ctx.device).expand(rows, -1)
        flat = in_squares(tower, torch.stack([y, x], dim=-1))
        for frame in range(frames):
            places = torch.cat([torch.full_like(flat[:, :1], frame), flat], dim=1)
            parts.append((places.to(wide)[..., None] * inverse).flatten(1))
    angles = torch.cat(parts)
    return angles.cos(), angles.sin()
