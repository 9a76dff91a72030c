"""Tiny checkpoints as engines want them: what published configs say beside what transformers writes, whole blocks."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.checkpoints import fp8, quantized
from tests.checkpoints.store import write_checkpoint
from tests.checkpoints.variants import DEEPSEEK_FP8, QWEN_FP8

DENSE = ("llama", "qwen2", "qwen3")
EXPERTS = (
    "mixtral", "qwen3_moe", "qwen3_moe_tied", "qwen3_next_wide", "glm4_moe", "ernie4_5_moe", "minimax_m2",
    "llama4_even", "gpt_oss_wide", "deepseek_v2", "deepseek_v3",
)  # fmt: skip
"""What the engine is compared on; one with experts must come first (vllm_compare.py)."""
TOWER = ("kimi_k25",)
"""With a vision tower, for which plans give the first stage fewer layers than vLLM does."""
BLOCK = 128
"""Rows and columns of an FP8 block; the engine has no kernel for others."""
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 512}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_moe": WIDE | {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64, "num_experts": 8},
    "deepseek_v3": WIDE | {
        "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64,
        "n_routed_experts": 8,
    },
}  # fmt: skip
"""Sizes at which four ranks cut whole blocks."""


def families(sizes: dict[str, int]) -> tuple[str, ...]:
    """What is compared at these sizes."""
    return (*EXPERTS, *(() if "pp" in sizes else TOWER), *(() if "ep" in sizes else DENSE))


def as_published(source: Path) -> Path:
    """Let the config of `source` say its class, how its router chooses and what isn't quantised; returns `source`."""
    config = json.loads((source / "config.json").read_text())
    text = config.get("text_config", config)
    if text["model_type"] == "deepseek_v3":
        text |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    if config["model_type"] == "kimi_k25":
        config["architectures"] = ["KimiK25ForConditionalGeneration"]
    if config["model_type"] == "minimax_m2":
        config |= {"rotary_dim": 8, "use_routing_bias": True, "scoring_func": "sigmoid"}
    if config.get("quantization_config", {}).get("quant_method") == "fp8":
        routers = [f"model.layers.{layer}.mlp.gate" for layer in range(text["num_hidden_layers"])]
        index = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
        tower = [key.removesuffix(".weight") for key in index if key.startswith(("vision_tower.", "mm_projector."))]
        config["quantization_config"]["modules_to_not_convert"] = [*routers, *tower, "lm_head"]
    (source / "config.json").write_text(json.dumps(config))
    return source


def make_wide(name: str, format: str, folder: Path, **sizes: int) -> Path:
    """Write a checkpoint of the family `name` with whole blocks, its weights in FP8 (`fp8`) or INT4 (`int4`).

    `sizes` of its config differ from those of SHAPES.
    """
    from tests.checkpoints import tiny

    variant = tiny.EVERYTHING[name]
    if name == "kimi_k25":
        text = variant.config["text_config"] | SHAPES["deepseek_v3"] | sizes
        variant = replace(variant, config={**variant.config, "text_config": text})
    else:
        variant = replace(variant, config={**variant.config, **SHAPES[name], **sizes})
    tensors, config = tiny.base(variant, torch.Generator().manual_seed(0))
    if format == "fp8":
        pattern, announced = QWEN_FP8 if name == "qwen3_moe" else DEEPSEEK_FP8, fp8.config(BLOCK)
        stored, _ = quantized.store(tensors, pattern, _fp8)
    else:
        pattern, announced = (
            QWEN_FP8 if name == "qwen3_moe" else r"mlp\.experts\..*proj\.weight$",
            quantized.int4_config(),
        )
        stored, _ = quantized.store(tensors, pattern, quantized.int4_group)
        announced["ignore"] = sorted({name.removesuffix(".weight") for name in tensors if not re.search(pattern, name)})
    write_checkpoint(folder, stored, config | {"quantization_config": announced}, 2)
    return as_published(folder)


def _fp8(name: str, weight: Tensor) -> quantized.Quantized:
    values, scales, plain = fp8.quantize(weight, BLOCK)
    return {name: values, name + "_scale_inv": scales}, plain
