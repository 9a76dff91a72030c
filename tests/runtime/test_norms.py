"""Norms against transformers' and torch's own, in every type of arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

from runtime.blocks.context import RankContext, single_rank
from runtime.blocks.norms import layer_norm, model_norm
from runtime.blocks.weights import Stored
from shard_plans.families.model import Model

KINDS: dict[str, Any] = {
    "rms": LlamaRMSNorm, "rms_zero_centred": Qwen3NextRMSNorm, "rms_cast_last": DeepseekV4RMSNorm
}  # fmt: skip
EPS = 1e-3


def context(kind: str, compute: torch.dtype) -> RankContext:
    return single_rank(Model("", {}, {}, {}, (), {"norm": kind, "eps": EPS}, False), compute, torch.device("cpu"))


def numbers(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Activations, some large, and a weight in float32."""
    generator = torch.Generator().manual_seed(3)
    return 30 * torch.randn(50, 24, generator=generator).to(dtype), torch.randn(24, generator=generator)


def ours(kind: str, dtype: torch.dtype) -> Tensor:
    x, weight = numbers(dtype)
    return model_norm(context(kind, dtype), {"norm": Stored(weight)}, "norm", x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_norm_is_transformers_own(kind: str, dtype: torch.dtype) -> None:
    x, weight = numbers(dtype)
    module = KINDS[kind](24, eps=EPS)
    module.weight.data = weight.to(dtype) if kind == "rms" else weight
    with torch.no_grad():
        assert torch.equal(ours(kind, dtype), module(x))


def test_each_kind_is_another() -> None:
    found = [ours(kind, torch.bfloat16) for kind in KINDS]
    assert not torch.equal(found[0], found[2]) and not torch.allclose(found[0], found[1])
    assert torch.allclose(ours("rms", torch.float32), ours("rms_cast_last", torch.float32), rtol=1e-6)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_the_layer_norm_is_torchs_own(dtype: torch.dtype, limit: float) -> None:
    x, weight = numbers(dtype)
    bias = weight.flip(0).to(dtype)
    theirs = functional.layer_norm(x, (24,), weight.to(dtype), bias, EPS)
    mine = layer_norm(x, weight.to(dtype), bias, EPS)
    assert mine.dtype == dtype and torch.allclose(mine, theirs, rtol=limit, atol=limit)
    assert not torch.allclose(layer_norm(x, weight.to(dtype), bias, 100.0), theirs, rtol=limit, atol=limit)
