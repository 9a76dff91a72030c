"""The dense feed-forward block, and the activation that experts share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from runtime.blocks.context import RankContext
from runtime.blocks.linear import fused_linear, row_linear
from runtime.blocks.weights import LayerWeights


def gated(words: Mapping[str, Any], gate: Tensor, up: Tensor) -> Tensor:
    """The activation of a gated unit by the word `act`.

    `silu`: silu(gate) * up. `gpt_oss`: gate sigmoid(alpha gate) * (up + 1), and `silu_clamped`: silu(gate) * up, both
    of gate no higher than `limit` and up between -limit and limit. `situ` bounds both factors by `beta` and
    `linear_beta`: beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta), in float32 or higher.
    """
    if words["act"] == "silu":
        return functional.silu(gate) * up
    if words["act"] in ("gpt_oss", "silu_clamped"):
        limit: float = words["limit"]
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        if words["act"] == "silu_clamped":
            return functional.silu(gate) * up
        alpha: float = words["alpha"]
        return gate * (gate * alpha).sigmoid() * (up + 1)
    beta: float = words["beta"]
    linear: float = words["linear_beta"]
    wide = torch.promote_types(gate.dtype, torch.float32)
    g, u = gate.to(wide), up.to(wide)
    return (beta * (g / beta).tanh() * g.sigmoid() * (linear * (u / linear).tanh())).to(gate.dtype)


def swiglu(
    ctx: RankContext, words: Mapping[str, Any], weights: LayerWeights, prefix: str, size: str, x: Tensor
) -> Tensor:
    """down(gated(gate x, up x)), gate and up column-parallel, down row-parallel: [T, hidden] -> [T, hidden].

    `prefix` is `mlp` or `shared`, `size` names its width in the family table; reads PREFIX.gate_up or PREFIX.gate and
    PREFIX.up, and PREFIX.down.
    """
    width = ctx.share(size)
    gate, up = fused_linear(ctx, weights, f"{prefix}.gate_up", (f"{prefix}.gate", f"{prefix}.up"), (width, width), x)
    return row_linear(ctx, weights, f"{prefix}.down", gated(words, gate, up))
