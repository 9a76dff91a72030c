"""One layer step by step: most tokens at once, the last ones a token at a time through its cache."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.blocks import forward
from runtime.blocks.beside import Beside
from runtime.blocks.cache import LayerCache
from runtime.blocks.context import RankContext
from runtime.blocks.weights import LayerWeights
from runtime.checking.probes import Replay, Routes
from shard_plans.families.model import Layer

STEPS = 4
"""Tokens that are run one at a time."""


def decode(
    ctx: RankContext, layer: Layer, weights: LayerWeights, start: Tensor, beside: Beside, routes: Routes | None,
    noise: float,
) -> Tensor | None:  # fmt: skip
    """The stream behind the layer of the last tokens [steps, .., hidden], `start` being that of all into it.

    None for a single token. Near-ties of `routes` (those of a prefill; `noise` as of Replay) are replayed.
    """
    tokens = len(start)
    if tokens < 2:
        return None
    first, cache, out = max(1, tokens - STEPS), LayerCache(), []
    for rows in ((0, first), *((token, token + 1) for token in range(first, tokens))):
        here = beside.rows(*rows)
        probe = Replay(None if routes is None else routes.rows(*rows), noise)
        positions = torch.arange(*rows, device=start.device)
        out.append(forward.run_layer(ctx, layer, weights, start[slice(*rows)], cache, positions, here, probe)[0])
    return torch.cat(out[1:])
