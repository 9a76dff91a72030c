"""The patch merger (patchmergerv2): merged features of an image to rows of the embedding's width."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from runtime.blocks.context import RankContext
from runtime.blocks.linear import column_linear
from runtime.blocks.norms import rms_norm
from runtime.blocks.weights import LayerWeights, dense, take


def project(ctx: RankContext, weights: LayerWeights, x: Tensor, eps: float) -> Tensor:
    """Features [tokens, merge * vt] to [tokens, hidden]: linear, exact GELU, linear, RMSNorm with `eps`.

    Reads vision.merge0, vision.merge2 and vision.merge_norm, whole on every rank.
    """
    x = functional.gelu(column_linear(ctx, weights, "vision.merge0", x))
    x = column_linear(ctx, weights, "vision.merge2", x)
    return rms_norm(x, dense(take(weights, "vision.merge_norm"), ctx.compute), eps)
