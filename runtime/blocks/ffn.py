"""The dense feed-forward block."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from runtime.blocks.context import RankContext
from runtime.blocks.linear import fused_linear, row_linear
from runtime.blocks.weights import LayerWeights


def swiglu(ctx: RankContext, weights: LayerWeights, prefix: str, size: str, x: Tensor) -> Tensor:
    """down(silu(gate x) * up x), gate and up column-parallel, down row-parallel: [T, hidden] -> [T, hidden].

    `prefix` is `mlp` or `shared`, `size` names its width in the family table; reads PREFIX.gate_up or PREFIX.gate and
    PREFIX.up, and PREFIX.down.
    """
    width = ctx.share(size)
    gate, up = fused_linear(ctx, weights, f"{prefix}.gate_up", (f"{prefix}.gate", f"{prefix}.up"), (width, width), x)
    return row_linear(ctx, weights, f"{prefix}.down", functional.silu(gate) * up)
