"""`--weights` and the plan's `weights`: groups, formats, and what is refused."""

from __future__ import annotations

import pytest

from shard_plans.documents.plan import format_plan, parse_plan, plan_digest
from shard_plans.errors import PlanError
from shard_plans.families.weights import formats, group_of, parse_weights
from shard_plans.placement.precision import in_precision
from tests.conftest import MakeCheckpoint
from tests.tools.converted import bound
from tests.tools.plans import make_plan

MATRICES = ["attention", "experts", "shared", "mlp"]


def test_a_format_stands_for_the_matrices_of_layers_and_a_plain_one_for_more() -> None:
    assert parse_weights(["fp8_block"]) == dict.fromkeys(MATRICES, "fp8_block")
    assert parse_weights(["bf16"]) == dict.fromkeys([*MATRICES, "embeddings", "head"], "bf16")
    assert parse_weights([]) == {}


def test_what_is_said_of_a_group_goes_before_what_is_said_of_all() -> None:
    found = parse_weights(["experts=mxfp4_group", "fp8_block,mlp=stored"])
    assert found == {"attention": "fp8_block", "experts": "mxfp4_group", "shared": "fp8_block"}
    assert parse_weights(["norms=fp32"]) == {"norms": "fp32"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["fp9"], "'fp9' for attention is no format; formats: bf16, .*nvfp4, or stored"),
        (["experts=fp9"], "'fp9' for experts is no format"),
        (["expert=bf16"], "'expert' is no group of parameters; groups: attention, experts"),
        (["bf16", "fp16"], "names bf16 and 'fp16' for all groups"),
        (["experts=bf16", "experts=fp16"], "names bf16 and 'fp16' for experts"),
        (["norms=fp8_block"], "norms can't be stored as fp8_block; formats for them: bf16, fp16, fp32, or stored"),
        (["=bf16"], "'' is no group"),
        ([""], "'' for attention is no format"),
    ],
)
def test_what_makes_no_sense_is_refused(given: list[str], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        parse_weights(given)


@pytest.mark.parametrize(
    ("role", "quantised", "group"),
    [
        ("attn.q_b", True, "attention"), ("kda.f_a", True, "attention"), ("attn.norm", False, "norms"),
        ("kda.A_log", False, None), ("experts.gate_up", True, "experts"), ("experts.down.bias", False, "biases"),
        ("moe.router", False, "routers"), ("moe.router_bias", False, "biases"), ("moe.latent_up", True, "mlp"),
        ("shared.up", True, "shared"), ("mlp.down", True, "mlp"), ("embed", False, "embeddings"),
        ("mtp.embed", False, "embeddings"), ("head", False, "head"), ("mtp.proj", True, "mlp"),
        ("norm", False, "norms"),
        ("vision.qkv", False, None), ("moe.table", False, None), ("kda.q_conv", False, None),
    ],
)  # fmt: skip
def test_roles_have_groups(role: str, quantised: bool, group: str | None) -> None:
    assert group_of(role, quantised) == group


def test_a_plan_keeps_its_weights(tiny: MakeCheckpoint) -> None:
    from dataclasses import replace

    plan = make_plan(bound(tiny("llama")), {"tp": 2})
    other = replace(plan, weights={"attention": "fp8_block"})
    assert parse_plan(format_plan(other)).weights == {"attention": "fp8_block"}
    assert "weights" not in format_plan(plan)
    assert plan_digest(plan) != plan_digest(other) == plan_digest(parse_plan(format_plan(other)))
    text = format_plan(other).replace("fp8_block", "fp7")
    with pytest.raises(PlanError, match=r"line \d+: weights: 'fp7' for attention is no format"):
        parse_plan(text)


def test_what_is_converted_twice_comes_from_what_is_stored(tiny: MakeCheckpoint) -> None:
    binding = bound(tiny("deepseek_v3_fp8"))
    once = in_precision(binding, {"experts": "bf16"})
    twice = in_precision(once, {"experts": "nvfp4"})
    assert in_precision(twice, {}).parameters == binding.parameters
    assert [p.source for p in once.parameters if p.source] == [p.source for p in twice.parameters if p.source]
    assert all(p.source is None or p.group == "experts" for p in twice.parameters)


def test_shapes_that_a_format_cannot_hold_are_refused(tiny: MakeCheckpoint) -> None:
    binding = bound(tiny("llama_odd"))  # 72 columns
    with pytest.raises(
        PlanError, match=r"model.layers.0.self_attn.q_proj.weight can't be stored as mxfp4_blocks: .* 72"
    ):
        in_precision(binding, {"attention": "mxfp4_blocks"})
    assert set(formats()) >= {"bf16", "fp8_block", "fp8_channel", "int8_channel", "nvfp4"}
