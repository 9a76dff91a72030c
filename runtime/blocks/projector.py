"""The patch mergers: merged features of an image to rows of the embedding's width."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from runtime.blocks.context import RankContext
from runtime.blocks.images import Tower
from runtime.blocks.linear import column_linear
from runtime.blocks.norms import biased_norm, weighted_norm
from runtime.blocks.weights import LayerWeights


def project(ctx: RankContext, tower: Tower, weights: LayerWeights, x: Tensor) -> Tensor:
    """Features [tokens, merge * vt] to [tokens, hidden]: linear, exact GELU, linear, and a norm with the tower's eps.

    MoonViT3d (patchmergerv2) has an RMSNorm behind them; the others a LayerNorm before them, over each patch alone.
    Reads vision.merge0, vision.merge2 and vision.merge_norm, whole on every rank.
    """
    if tower.kind == "moonvit3d":
        x = perceptron(ctx, weights, "vision.merge0", "vision.merge2", x)
        return weighted_norm(ctx, weights, "vision.merge_norm", x, tower.eps)
    patches = x.view(-1, ctx.size("vt"))
    x = biased_norm(ctx, weights, "vision.merge_norm", patches, tower.eps).view(x.shape)
    return perceptron(ctx, weights, "vision.merge0", "vision.merge2", x)


def perceptron(ctx: RankContext, weights: LayerWeights, first: str, second: str, x: Tensor) -> Tensor:
    """Two products with an exact GELU between them."""
    return column_linear(ctx, weights, second, functional.gelu(column_linear(ctx, weights, first, x)))
