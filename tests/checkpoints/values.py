"""Random values under which every stored tensor matters: nothing neutral, nothing that saturates."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

ROUTER_BIAS = "e_score_correction_bias"


def router_bias(count: int, generator: torch.Generator) -> Tensor:
    """As trained ones are: a large common offset, which a cast to bf16 would ruin, with small differences; fp32."""
    return 5 + 0.15 * torch.randn(count, generator=generator)


def values(name: str, shape: torch.Size, tied: bool, generator: torch.Generator) -> Tensor:
    """Values for the stored tensor `name`: unit-variance activations, norms around 1, biases not 0, sharp routers."""
    random = torch.randn(shape, generator=generator)
    parent, leaf = (["", *name.split(".")])[-2:]
    if leaf == ROUTER_BIAS:
        return router_bias(shape.numel(), generator)
    if len(shape) == 1:
        return 1 + 0.2 * random if "norm" in name.rsplit("layers.", 1)[-1] else 0.3 * random
    if "embed" in parent:
        return random / (math.sqrt(shape[1]) if tied else 1)
    gain = 2.0 if parent == "gate" else 1.0
    return gain * random / math.sqrt(shape[-1])


@torch.no_grad()
def fill(model: Any, tied: bool, generator: torch.Generator) -> None:
    """Fill a transformers model with what bf16 can hold, so that the fp32 reference sees the numbers on disk."""
    stored = set(model.state_dict())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name not in stored or not tensor.is_floating_point():
            continue  # inverse frequencies and their like
        new = values(name, tensor.shape, tied, generator)
        tensor.copy_(new if name.endswith(ROUTER_BIAS) else new.to(torch.bfloat16).float())
