"""Random values under which every stored tensor matters: nothing neutral, nothing that saturates."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

ROUTER_BIAS = "e_score_correction_bias"
TABLE = "tid2eid"
"""Experts by token id, where the first layers route so."""
INPUT_FIRST = ("gpt_oss", "llama4_text")
"""Architectures whose stacked experts multiply from the left: [expert, in, out]."""


def router_bias(count: int, generator: torch.Generator, spread: float = 0.15, offset: float = 5.0) -> Tensor:
    """As trained ones are: a large common offset, which a cast to bf16 would ruin, with small differences; fp32."""
    return offset + spread * torch.randn(count, generator=generator)


def values(
    name: str, shape: torch.Size, tied: bool, generator: torch.Generator, centre: float = 1.0, input_first: bool = False
) -> Tensor:
    """Values for the stored tensor `name`: unit-variance activations, norms around `centre`, biases not 0.

    Routers are sharp; `input_first` says that stacked experts are [expert, in, out].
    """
    random = torch.randn(shape, generator=generator)
    parent, leaf = (["", *name.split(".")])[-2:]
    if leaf == ROUTER_BIAS:
        return router_bias(shape.numel(), generator).view(shape)
    if leaf == "A_log":
        return torch.log(1 + 3 * torch.rand(shape, generator=generator))
    if leaf == "dt_bias":
        return 0.5 * random
    if leaf == "sinks":
        return random
    if len(shape) == 1:
        norm = "norm" in name.rsplit("layers.", 1)[-1] and leaf == "weight"
        return centre + 0.2 * random if norm else 0.3 * random
    if "embed" in parent and len(shape) == 2:
        return random / (math.sqrt(shape[1]) if tied else 1)
    fan_in = math.prod(shape[1:]) if len(shape) != 3 else shape[1 if input_first else 2]
    gain = 2.0 if parent in ("gate", "router", "classifier") else 1.0
    return gain * random / math.sqrt(fan_in)


@torch.no_grad()
def fill(model: Any, generator: torch.Generator) -> None:
    """Fill a transformers model with what bf16 can hold, so that the fp32 reference sees the numbers on disk."""
    stored, text = set(model.state_dict()), model.config.get_text_config()
    softmax = type(model).__name__.startswith("Ernie")  # scores are about 1 / experts there, not about a half
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name not in stored:
            continue  # inverse frequencies and their like
        if name.endswith(TABLE):
            rows, chosen = tensor.shape
            picks = [torch.randperm(text.n_routed_experts, generator=generator)[:chosen] for _ in range(rows)]
            tensor.copy_(torch.stack(picks))
        if not tensor.is_floating_point():
            continue
        if name.endswith(ROUTER_BIAS):
            spread, offset = (0.02, 0.0) if softmax else (0.15, 5.0)
            tensor.copy_(router_bias(tensor.numel(), generator, spread, offset).view(tensor.shape))
            continue
        centre = float(tensor.float().mean().round()) if tensor.dim() == 1 else 1.0  # 1, or 0 where 1 is added to it
        tied, input_first = text.tie_word_embeddings, text.model_type in INPUT_FIRST
        new = values(name, tensor.shape, tied, generator, centre, input_first)
        tensor.copy_(new.to(torch.bfloat16).float())
