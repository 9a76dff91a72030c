"""Published configs (tests/checkpoints/configs): the tables' totals against published indexes and transformers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from shard_plans.documents.plan import Plan
from shard_plans.families.binding import Binding
from shard_plans.families.config_binding import bind_config
from shard_plans.families.family import load_family
from shard_plans.verbs import open_model, plan_memory

CONFIGS = Path(__file__).parents[1] / "checkpoints" / "configs"
ALL = sorted(path.stem for path in CONFIGS.glob("*.json"))
INDEXES = {
    "kimi-k3": (497_220, 1_560_860_324_864),
    "kimi-k2.5": (208_550, 595_148_192_736),
    "deepseek-v3": (91_991, 688_574_839_360),
    "qwen3-235b": (36_945, 470_187_269_120),
    "qwen3-30b": (18_867, 61_064_245_248),
    "qwen3-8b": (399, 16_381_470_720),
    "llama-3.1-70b": (723, 141_107_412_992),
    "mixtral-8x7b": (995, 93_405_585_408),
    "gpt-oss-120b": (687, 65_248_815_744),
    "gpt-oss-20b": (459, 13_761_264_768),
    "qwen3.5-397b": (2_924, 806_795_875_168),
    "deepseek-v4-flash": (69_187, 159_609_485_896),
}
"""Tensors and payload bytes of published checkpoints: metadata.total_size of their index, or counted from headers."""
UNKNOWN_TO_TRANSFORMERS = {"kimi-k3": None, "kimi-k2": "deepseek_v3", "minimax-m3": "minimax_m3_vl"}
"""model_type that transformers lacks -> one that it builds the same weights for, where there is one."""


def values(binding: Binding) -> int:
    """Weight values outside multi-token-prediction layers, which transformers doesn't build."""
    return sum(
        len(part.tensors) * math.prod(part.shape) * (parameter.format.pack if parameter.format is not None else 1)
        for parameter in binding.parameters
        for part in parameter.parts[:1]
        if parameter.stage != "mtp"
    )


def bound(config: dict[str, Any]) -> Binding:
    return bind_config(config, "0" * 32, Path("config.json"), load_family(config))


def built(config: dict[str, Any]) -> int:
    """Values of all weights and stored buffers that transformers builds for a config, on the meta device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    plain = {key: value for key, value in config.items() if key not in ("quantization_config", "auto_map")}
    if "text_config" in plain:
        plain["text_config"] = {
            key: value for key, value in plain["text_config"].items() if key not in ("quantization_config", "auto_map")
        }
    made = AutoConfig.for_model(plain.pop("model_type"), **plain)
    with torch.device("meta"):
        try:
            model = AutoModelForImageTextToText.from_config(made)
        except ValueError:
            model = AutoModelForCausalLM.from_config(made)
    tower = () if "vision_config" in config else ("vision", "multi_modal", "patch_merge")  # defaults of the class
    return sum(tensor.numel() for name, tensor in model.state_dict().items() if not any(word in name for word in tower))


def read(name: str) -> dict[str, Any]:
    return dict(json.loads((CONFIGS / f"{name}.json").read_text()))


@pytest.mark.parametrize("name", INDEXES)
def test_totals_of_published_indexes(name: str) -> None:
    source = bound(read(name)).source
    assert (len(source), source.total_bytes) == INDEXES[name]


@pytest.mark.parametrize("name", ALL)
def test_every_published_config_can_be_planned(name: str) -> None:
    model = open_model(CONFIGS / f"{name}.json")
    names = model.source.names
    assert len(set(names)) == len(names) == len(model.source)
    plan: Plan = plan_memory(model, "16x8:180GB", tp=8, pp=16, ep=8 if model.model.sizes.get("experts") else None)
    assert plan.ledger is not None and len(plan.ledger) == 128 and plan.checkpoint.tensors == len(model.source)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ALL if UNKNOWN_TO_TRANSFORMERS.get(name, "") is not None])
def test_values_are_those_that_transformers_builds(name: str) -> None:
    config = read(name)
    if name == "llama-4-maverick":  # this config has no vision section; transformers then takes its own
        from transformers import Llama4VisionConfig

        config["vision_config"] = Llama4VisionConfig().to_dict()
    if name == "step-3.7-flash":
        from transformers import Step3p7VisionConfig

        tower = {key: value for key, value in Step3p7VisionConfig().to_dict().items() if value is not None}
        text = {key: value for key, value in config.items() if key != "model_type"}
        text["attention_other_setting"] = {"attention_type": "sliding_attention", "num_attention_heads": 96}
        config = {"model_type": "step3p7", "text_config": text, "vision_config": tower}
    theirs = {**config, "model_type": UNKNOWN_TO_TRANSFORMERS.get(name, config["model_type"])}
    if name == "minimax-m3":
        theirs = {"model_type": theirs["model_type"], "text_config": {**config, "model_type": "minimax_m3_vl_text"}}
    assert values(bound(config)) == built(theirs)
    config["hidden_size"] = config.get("hidden_size", 0) + 128  # the control: one size changed in ours alone
    if "text_config" in config:
        config["text_config"] = {**config["text_config"], "hidden_size": config["text_config"]["hidden_size"] + 128}
    assert values(bound(config)) != built(theirs)
