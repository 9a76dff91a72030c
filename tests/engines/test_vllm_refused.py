"""vLLM's folders: what they can't hold is refused, with the reason and the way out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from converter.verbs import convert
from shard_plans.errors import GridError, PlanError
from tests.conftest import MakeCheckpoint
from tests.engines.checkpoints import as_published


@pytest.mark.parametrize(
    ("name", "sizes", "words"),
    [
        ("qwen3_moe", {"dp": 2}, "give dp 1"),
        ("qwen3_moe", {"tp": 4, "ep": 2, "etp": 2}, "whole experts to all ranks"),
        ("deepseek_v3", {}, "topk_method None; the engine drops it"),
        ("qwen3_moe_fp8", {}, "model.layers.0.mlp.gate as it is stored, in bf16 in an FP8 checkpoint"),
        ("glm4_moe", {"weights": "experts=fp8_block"}, "leave out --weights"),
        ("qwen3_moe", {"weights": "fp16"}, "leave out --weights"),
        ("gpt_oss_mxfp4", {}, "depends on the kernels"),
        ("kimi_k25_int4", {}, "depends on the kernels .* for --load-format reshard"),
        ("qwen3_moe_fp8", {"tp": 4}, "8 wide on a rank .* allow 8; choose a smaller tp, or --ep 4, or a --moe-backend"),
        ("llama4_text", {}, "layer 0, which is no moe layer; the engine goes by"),
        ("kimi_linear", {}, "there is no key map for it"),
        ("qwen3_next", {"tp": 4}, "tp 4 doesn't divide the 2 key heads of linear attention, which the engine only"),
    ],
)
def test_what_it_cannot_hold_is_refused(
    name: str, sizes: dict[str, Any], words: str, tiny: MakeCheckpoint, own_tiny: MakeCheckpoint, tmp_path: Path
) -> None:
    with pytest.raises((PlanError, GridError), match=words):
        source = as_published(own_tiny(name)) if "tp" in sizes else tiny(name)
        convert(source, tmp_path / "out", layout="vllm@0.33", **sizes)


@pytest.mark.parametrize("listed", [["mlp.gate"], ["model.layers.0.mlp.gate"], "model.layers.1.mlp.gate", ["lm_head"]])
def test_a_router_is_plain_where_its_full_name_is_listed(listed: Any, own_tiny: MakeCheckpoint, tmp_path: Path) -> None:
    """Every layer's: the engine compares whole names."""
    source = as_published(own_tiny("qwen3_moe_fp8"))
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = listed
    (source / "config.json").write_text(json.dumps(config))
    first = 1 if listed == ["model.layers.0.mlp.gate"] else 0
    with pytest.raises(PlanError, match=rf"model.layers.{first}.mlp.gate as it is stored.* list that full name"):
        convert(source, tmp_path / "out", layout="vllm@0.33")


def test_ranks_above_the_kv_heads_of_gpt_oss_are_refused(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    with pytest.raises(GridError, match="tp 4 is above the 2 KV heads"):
        convert(tiny("gpt_oss"), tmp_path / "out", layout="vllm@0.33", tp=4)
    convert(tiny("gpt_oss"), tmp_path / "out", layout="vllm@0.33", tp=2)


def test_another_release_is_refused(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    with pytest.raises(
        PlanError, match=r"layout 'vllm@0.1' isn't known; known: reshard, deepseek-mp, vllm@0.23, vllm@0.33"
    ):
        convert(tiny("llama"), tmp_path / "out", layout="vllm@0.1")
