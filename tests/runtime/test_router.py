"""Scores and weights of routers against transformers' own modules."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.blocks.router import Routing, route

WIDTH, EXPERTS, TOPK, TOKENS = 16, 8, 3, 40
CONFIGS: dict[str, tuple[str, str, str, dict[str, Any], dict[str, Any]]] = {
    "clamp": (
        "ernie4_5_moe", "Ernie4_5_MoeConfig", "Ernie4_5_MoeTopKRouter",
        {"moe_num_experts": EXPERTS, "moe_k": TOPK, "moe_norm_min": 0.5},
        {"score": "softmax", "router_bias": True, "renormalize": "clamp", "renormalize_min": 0.5},
    ),
    "softmax of the chosen": (
        "gpt_oss", "GptOssConfig", "GptOssTopKRouter", {"num_local_experts": EXPERTS, "num_experts_per_tok": TOPK},
        {"score": "softmax_of_topk", "router_bias": "logits"},
    ),
    "sqrt of softplus": (
        "deepseek_v4", "DeepseekV4Config", "DeepseekV4TopKRouter",
        {"n_routed_experts": EXPERTS, "num_experts_per_tok": TOPK, "routed_scaling_factor": 1.5,
         "scoring_func": "sqrtsoftplus"},
        {"score": "sqrtsoftplus", "router_bias": True, "renormalize": True, "scale": 1.5},
    ),
    "by token id": (
        "deepseek_v4", "DeepseekV4Config", "DeepseekV4HashRouter",
        {"n_routed_experts": EXPERTS, "num_experts_per_tok": TOPK, "routed_scaling_factor": 1.5, "vocab_size": 50,
         "scoring_func": "sqrtsoftplus"},
        {"score": "hash", "renormalize": True, "scale": 1.5},
    ),
}  # fmt: skip


def make(name: str) -> tuple[Any, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Transformers' router with random weights; tokens; its weight and bias; and the experts that ids decide."""
    module, config, network, arguments, _ = CONFIGS[name]
    code = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    settings = importlib.import_module(f"transformers.models.{module}.configuration_{module}")
    router = getattr(code, network)(getattr(settings, config)(hidden_size=WIDTH, **arguments))
    generator = torch.Generator().manual_seed(1)
    found: dict[str, Tensor] = {}
    for key, tensor in router.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * (1.0 if key == "weight" else 0.3))
        else:
            rows = [torch.randperm(EXPERTS, generator=generator)[:TOPK] for _ in range(len(tensor))]
            tensor.copy_(torch.stack(rows))
        found[key.rpartition(".")[2]] = tensor
    bias = next((found[key].flatten() for key in ("bias", "e_score_correction_bias") if key in found), None)
    x, ids = torch.randn(TOKENS, WIDTH, generator=generator), torch.arange(TOKENS)
    return router, x, found["weight"], bias, found["tid2eid"][ids] if "tid2eid" in found else None


def both(name: str, words: dict[str, Any]) -> tuple[Routing, tuple[Tensor, Tensor]]:
    """Our routing, and transformers' experts and weights."""
    router, x, weight, bias, given = make(name)
    with torch.no_grad():
        _, weights, indices = router(x) if given is None else router(x, torch.arange(TOKENS))
    return route(words, TOPK, x, weight, bias, given), (indices, weights)


def error(ours: Routing, indices: Tensor, weights: Tensor) -> float:
    """Worst difference of a weight, expert by expert."""
    spread = [
        torch.zeros(TOKENS, EXPERTS).scatter_(1, chosen, shares)
        for chosen, shares in ((ours.indices, ours.weights), (indices, weights))
    ]
    return float((spread[0] - spread[1]).abs().max())


@pytest.mark.parametrize("name", CONFIGS)
def test_experts_and_weights_are_transformers_own(name: str) -> None:
    ours, (indices, weights) = both(name, CONFIGS[name][4])
    assert torch.equal(ours.indices.sort(-1).values, indices.sort(-1).values)
    assert error(ours, indices, weights) < 1e-6
    if name == "by token id":
        assert bool(ours.margin.isinf().all())


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "no clamp": ("clamp", {"renormalize": True}),
    "another floor": ("clamp", {"renormalize_min": 0.6}),
    "softmax of all": ("softmax of the chosen", {"score": "softmax"}),
    "a bias beside the scores": ("softmax of the chosen", {"score": "sqrtsoftplus", "router_bias": True}),
    "sigmoid": ("sqrt of softplus", {"score": "sigmoid"}),
    "no scale": ("by token id", {"scale": None}),
    "not to one": ("by token id", {"renormalize": False}),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_word_is_seen(what: str) -> None:
    name, words = WRONG[what]
    ours, (indices, weights) = both(name, CONFIGS[name][4] | words)
    assert error(ours, indices, weights) > 1e-3
