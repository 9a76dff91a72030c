"""Which modules a quantization_config means, by the lists of published configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shard_plans.errors import ConfigError
from shard_plans.families.targets import Targets

CONFIGS = Path(__file__).parents[1] / "checkpoints" / "configs"
LAYER = "model.layers.3."


@pytest.mark.parametrize(
    ("entry", "named", "others"),
    [
        ("lm_head", ["lm_head", "language_model.lm_head"], ["lm_head2", "model.lm"]),
        ("mlp.gate", [LAYER + "mlp.gate"], [LAYER + "mlp.gate_proj", LAYER + "mlp.experts.0.gate"]),
        ("gate", [LAYER + "block_sparse_moe.gate"], [LAYER + "mlp.gate_proj"]),
        ("model.layers.3", [LAYER + "mlp.gate"], ["model.layers.30.mlp.gate", "model.layers.2.mlp"]),
        (LAYER + "self_attn.q_proj.weight", [LAYER + "self_attn.q_proj"], [LAYER + "self_attn.k_proj"]),
        ("model.layers.*.self_attn", [LAYER + "self_attn.o_proj"], [LAYER + "mlp.experts"]),
        ("re:.*self_attn.*", [LAYER + "self_attn.o_proj"], [LAYER + "mlp.up_proj"]),
        (r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", [LAYER + "mlp.up_proj"], [LAYER + "mlp.experts.0.up_proj"]),
        ("re:lm_head", ["lm_head"], ["language_model.lm_head"]),
        (r"re:model\.layers\.(1|3)\..*", [LAYER + "mlp"], ["model.layers.2.mlp", "model.layers.33.mlp"]),
    ],
)
def test_entries_that_stay_plain(entry: str, named: list[str], others: list[str]) -> None:
    for key in ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules"):
        targets = Targets({key: ["something.else", entry]})
        assert not any(map(targets.quantises, named)) and all(map(targets.quantises, others))


def test_targets_of_a_group() -> None:
    def aimed(*targets: str, ignore: list[str] | None = None) -> Targets:
        return Targets({"config_groups": {"group_0": {"targets": list(targets)}}, "ignore": ignore})

    assert aimed("Linear").quantises("a.b") and aimed("QKVParallelLinear").quantises("a.b")
    assert aimed("re:.*experts.*").quantises("mlp.experts.0.up") and not aimed("re:.*experts.*").quantises("mlp.up")
    assert not aimed("re:.*experts.*", ignore=["mlp.experts.3"]).quantises("mlp.experts.3.up")
    with pytest.raises(ConfigError, match=r"names the class .?Embedding"):
        aimed("Embedding")
    with pytest.raises(ConfigError, match="2 config_groups"):
        Targets({"config_groups": {"group_0": {}, "group_1": {}}})


def test_single_experts_are_noticed() -> None:
    targets = Targets({"ignore": [LAYER + "mlp.experts.7.up_proj", "lm_head"]})
    assert targets.singles_out(LAYER + "mlp.experts") and not targets.singles_out("model.layers.4.mlp.expert")
    assert not Targets({"ignore": [LAYER + "mlp.experts"]}).singles_out(LAYER + "mlp.experts")


@pytest.mark.parametrize("value", [5, "lm_head", {"a": 1}, [1], [None], [["a"]]])
def test_what_is_no_list_of_names(value: Any) -> None:
    with pytest.raises(ConfigError, match="a list of module names is wanted"):
        Targets({"ignore": value})


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$",
        "(.*)*x",
        "(a|a){30}",
        ".*.*.*.*x",
        r"(a)\1",
        "(?P<n>a)(?P=n)",
        "(",
        "[",
        "a" * 301,
        "(?i)a",
        "x{99999999999}",
    ],
)
def test_patterns_that_could_take_for_ever(pattern: str) -> None:
    with pytest.raises(ConfigError, match="which can't be used"):
        Targets({"ignore": [f"re:{pattern}"]})


def test_more_patterns_than_any_config_has() -> None:
    with pytest.raises(ConfigError, match="more than 32 patterns"):
        Targets({"ignore": [f"re:{number}.*" for number in range(40)]})


def test_kimi_k3_quantises_its_routed_experts_alone() -> None:
    text = json.loads((CONFIGS / "kimi-k3.json").read_text())["text_config"]
    targets, at = Targets(text["quantization_config"]), "language_model.model.layers.5."
    assert targets.quantises(at + "block_sparse_moe.experts.0.w1")
    for plain in (at + "self_attn.q_proj", at + "block_sparse_moe.shared_experts.up_proj", at + "mlp.up_proj"):
        assert not targets.quantises(plain)
    assert Targets(None).quantises("anything") and Targets({"quant_method": "fp8"}).quantises("anything")
