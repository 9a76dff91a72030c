"""The tiny checkpoints with six layers, in which a bug can be put into one of many."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tests.checkpoints.architectures import ARCHITECTURES, LINEAR
from tests.checkpoints.variants import VARIANTS, Variant

LAYERS = 6
HYBRID = {"layer_types": 2 * LINEAR}


def deep(variant: Variant, **config: Any) -> Variant:
    """The variant with more layers, and what else its configuration says."""
    return replace(variant, config={**variant.config, "num_hidden_layers": LAYERS, **config})


def within(variant: Variant, **config: Any) -> Variant:
    """The same of one that keeps its text model in a section."""
    text: Mapping[str, Any] = variant.config["text_config"]
    return replace(variant, config={**variant.config, "text_config": {**text, "num_hidden_layers": LAYERS, **config}})


DEEP: dict[str, Variant] = {
    "qwen3_deep": deep(VARIANTS["qwen3"], num_key_value_heads=4),
    "glm4_moe_deep": deep(ARCHITECTURES["glm4_moe"], num_key_value_heads=4),
    "deepseek_v3_deep": deep(VARIANTS["deepseek_v3_fp8"]),
    "deepseek_v32_deep": deep(ARCHITECTURES["deepseek_v32"]),
    "gpt_oss_deep": deep(
        ARCHITECTURES["gpt_oss_mxfp4"],
        layer_types=3 * ["sliding_attention", "full_attention"],
        num_key_value_heads=4,
        intermediate_size=128,
    ),
    "qwen3_next_deep": deep(
        ARCHITECTURES["qwen3_next"], **HYBRID, linear_num_key_heads=4, linear_num_value_heads=8, num_key_value_heads=4
    ),
    "kimi_linear_deep": deep(ARCHITECTURES["kimi_linear"], **HYBRID, mlp_layer_types=["dense"] + 5 * ["sparse"]),
    "kimi_k25_deep": within(ARCHITECTURES["kimi_k25_int4"]),
}
