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
from runtime.blocks.norms import biased_norm, layer_norm, model_norm, weighted_norm
from runtime.blocks.qk_norm import norm_heads, unit_heads
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


LARGE = 6e4
"""Near float16's largest number, 65504: its square is no float16, and no sum of two such is."""


def test_large_float16_numbers_do_not_overflow() -> None:
    x = torch.tensor([[LARGE, -LARGE, LARGE / 2, 0.0] * 6], dtype=torch.float16)
    assert x.pow(2).mean().isinf() and not x.isinf().any()  # what a norm in float16 would do
    weights = {"n": Stored(torch.ones(24)), "n.bias": Stored(torch.zeros(24))}
    weights |= {f"attn.{part}_norm": Stored(torch.ones(24)) for part in "qk"}
    wide = x.double()
    rms, centred = wide / wide.pow(2).mean().sqrt(), wide - wide.mean()
    for kind in KINDS:
        ctx = context(kind, torch.float16)
        twice = 2.0 if kind == "rms_zero_centred" else 1.0  # 1 + weight
        assert_close(model_norm(ctx, weights, "n", x), twice * rms)
        heads = x.view(1, 1, 24)
        for found in norm_heads(ctx, "per_head", weights, heads, heads):
            assert_close(found, twice * rms.view(1, 1, 24))
        assert_close(unit_heads(ctx, "l2", heads), rms.view(1, 1, 24))
        assert_close(weighted_norm(ctx, weights, "n", x, EPS), rms)
        assert_close(biased_norm(ctx, weights, "n", x, EPS), centred / centred.pow(2).mean().sqrt())


def test_large_float16_heads_of_one_norm_do_not_overflow() -> None:
    sizes = {"head_dim": 12, "heads": 2, "kv_heads": 2}
    model = Model("", {}, {}, sizes, (), {"norm": "rms", "eps": EPS}, False)
    weights = {f"attn.{part}_norm": Stored(torch.ones(24)) for part in "qk"}
    x = torch.tensor([[LARGE, -LARGE] * 12], dtype=torch.float16).view(1, 2, 12)
    for found in norm_heads(single_rank(model, torch.float16, torch.device("cpu")), "all_heads", weights, x, x):
        assert_close(found, x.double() / LARGE)


def assert_close(found: Tensor, wide: Tensor) -> None:
    assert found.dtype == torch.float16
    assert torch.allclose(found.double(), wide, atol=2e-3)
