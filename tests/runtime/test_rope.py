"""Rotary embeddings against transformers' formulas, in both spellings of the config."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, LlamaConfig, MixtralConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3
from transformers.models.llama import modeling_llama as llama

from runtime.blocks.rope import make_rope, rope_settings, rotate, softmax_scale
from shard_plans.errors import ConfigError, RuntimeFault
from tests.tools.oracle import LLAMA3, PLAIN, YARN

WIDTH = 24
BASE: dict[str, Any] = {
    "hidden_size": 96, "num_attention_heads": 4, "head_dim": WIDTH, "max_position_embeddings": 128,
}  # fmt: skip
ROPES: dict[str, dict[str, Any]] = {
    "default": PLAIN,
    "linear": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn, no mscale": {k: v for k, v in YARN.items() if "mscale" not in k},
    "yarn, not truncated": {**YARN, "truncate": False},
    "yarn, factor given": {**YARN, "attention_factor": 1.25},
    "yarn, defaults": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32},
    "yarn, equal betas": {**YARN, "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
    "yarn, from lengths": {**YARN, "factor": None},
}


def theirs(settings: dict[str, Any]) -> tuple[torch.Tensor, float]:
    config = LlamaConfig(**BASE, rope_parameters=dict(settings))
    if settings["rope_type"] == "default":
        inverse, factor = llama.LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        inverse, factor = ROPE_INIT_FUNCTIONS[settings["rope_type"]](config)
    return inverse, factor


def ours(text: dict[str, Any], compute: torch.dtype = torch.float32) -> tuple[torch.Tensor, float]:
    rope = make_rope(text, WIDTH, compute, torch.device("cpu"))
    return rope.inverse_frequencies, rope.attention_factor


@pytest.mark.parametrize("name", ROPES)
def test_frequencies_equal_transformers_bit_for_bit(name: str) -> None:
    inverse, factor = theirs(ROPES[name])
    mine, mine_factor = ours({**BASE, "rope_parameters": ROPES[name]})
    assert torch.equal(mine, inverse) and mine_factor == factor


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_the_older_spelling_says_the_same(name: str, key: str) -> None:
    scaling = {k: v for k, v in ROPES[name].items() if k not in ("rope_type", "rope_theta")}
    old = {**BASE, "rope_theta": ROPES[name]["rope_theta"], "rope_scaling": {**scaling, key: ROPES[name]["rope_type"]}}
    if name == "default":
        old["rope_scaling"] = None
    mine, factor = ours({**BASE, "rope_parameters": ROPES[name]})
    assert torch.equal(ours(old)[0], mine) and ours(old)[1] == factor
    config = LlamaConfig(**{**old, "rope_scaling": dict(old["rope_scaling"]) if old["rope_scaling"] else None})
    rotary = llama.LlamaRotaryEmbedding(config)
    assert torch.equal(rotary.inv_freq, mine) and rotary.attention_scaling == factor


@pytest.mark.parametrize("name", ROPES)
def test_cosine_and_sine_equal_transformers(name: str) -> None:
    positions = torch.tensor([0, 1, 17, 5000])
    rotary = llama.LlamaRotaryEmbedding(LlamaConfig(**BASE, rope_parameters=dict(ROPES[name])))
    cos, sin = rotary(torch.zeros(1), positions[None])
    rope = make_rope({**BASE, "rope_parameters": ROPES[name]}, WIDTH, torch.float32, torch.device("cpu"))
    mine_cos, mine_sin = rope.turns(positions, torch.float32)
    assert torch.equal(mine_cos, cos[0, :, : WIDTH // 2]) and torch.equal(mine_sin, sin[0, :, : WIDTH // 2])


@pytest.mark.parametrize("name", ROPES)
def test_angles_are_double_where_compute_is(name: str) -> None:
    text = {**BASE, "rope_parameters": ROPES[name]}
    (double, _), (single, _) = ours(text, torch.float64), ours(text)
    assert double.dtype == torch.float64 and single.dtype == ours(text, torch.bfloat16)[0].dtype == torch.float32
    assert torch.allclose(double.float(), single, rtol=1e-6)


def test_scaling_types_differ() -> None:
    results = [ours({**BASE, "rope_parameters": {**LLAMA3, **ROPES[n]}})[0] for n in ("default", "llama3", "yarn")]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert float((results[one] - results[other]).norm() / results[one].norm()) > 1e-3


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_rotation_equals_transformers(style: str) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(5, 3, WIDTH, generator=generator) for _ in range(2))
    rope = make_rope({**BASE, "rope_parameters": PLAIN}, WIDTH, torch.float32, torch.device("cpu"))
    cos, sin = rope.turns(torch.arange(5), torch.float32)
    both = (torch.cat([cos, cos], -1)[None], torch.cat([sin, sin], -1)[None])
    theirs = v3.apply_rotary_pos_emb_interleave if style == "interleaved" else llama.apply_rotary_pos_emb
    expected = theirs(q.transpose(0, 1)[None], k.transpose(0, 1)[None], *both)
    for mine, other in zip((rotate(style, q, cos, sin), rotate(style, k, cos, sin)), expected, strict=True):
        assert torch.allclose(mine, other[0].transpose(0, 1), atol=1e-6)
    other_style = "half" if style == "interleaved" else "interleaved"
    assert float((rotate(other_style, q, cos, sin) - expected[0][0].transpose(0, 1)).norm()) > 1e-1


def test_only_the_front_of_a_head_turns() -> None:
    rope = make_rope({**BASE, "rope_parameters": PLAIN}, 8, torch.float32, torch.device("cpu"))
    cos, sin = rope.turns(torch.arange(4), torch.float32)
    x = torch.randn(4, 2, WIDTH)
    turned = rotate("half", x, cos, sin)
    assert torch.equal(turned[..., 8:], x[..., 8:]) and not torch.equal(turned[1:, :, :8], x[1:, :, :8])
    with pytest.raises(RuntimeFault, match="no block for rope: spiral"):
        rotate("spiral", x, cos, sin)


@pytest.mark.parametrize("settings", [YARN, {**YARN, "mscale_all_dim": 0}, PLAIN])
def test_the_softmax_scale_equals_transformers(settings: dict[str, Any]) -> None:
    words, text = {"softmax_scale": "yarn_mscale2"}, {**BASE, "rope_parameters": settings}
    expected = v3.yarn_apply_mscale(settings, WIDTH**-0.5)
    assert softmax_scale(words, text, WIDTH) == pytest.approx(expected, rel=1e-12)
    assert softmax_scale({}, text, WIDTH) == WIDTH**-0.5


def test_published_spellings_are_read() -> None:
    kimi = {
        "max_position_embeddings": 131072, "rope_theta": 50000.0,
        "rope_scaling": {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 1.0,
                         "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    }  # fmt: skip
    config = DeepseekV3Config(qk_rope_head_dim=64, **{**kimi, "rope_scaling": dict(kimi["rope_scaling"])})  # type: ignore[call-overload]
    rope = make_rope(kimi, 64, torch.float32, torch.device("cpu"))
    assert torch.equal(rope.inverse_frequencies, v3.DeepseekV3RotaryEmbedding(config).inv_freq)
    mixtral = {"rope_theta": 1e6, "head_dim": 64}
    expected = MixtralConfig(head_dim=64, rope_theta=1e6).rope_parameters["rope_theta"]
    assert rope_settings(mixtral)["rope_theta"] == expected


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "su"}},
            RuntimeFault,
            "no block for rope_type: su; .* has default",
        ),
        ({"rope_parameters": {"full": {"rope_type": "yarn"}}}, RuntimeFault, "differ by layer type .full"),
        ({}, ConfigError, "gives no rope_theta"),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear"}},
            ConfigError,
            "linear needs a number factor, found None",
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "llama3", "factor": "8"}},
            ConfigError,
            "number factor, found '8'",
        ),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 2.0}}, ConfigError, "original_max_position"),
    ],
)
def test_settings_that_cannot_be_followed_are_refused(text: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        make_rope(text, WIDTH, torch.float32, torch.device("cpu"))
