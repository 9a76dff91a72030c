"""A config.json alone: the tensors that it announces are those that lie in a checkpoint of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shard_plans.checkpoints.config_file import config_alone, read_config
from shard_plans.documents.plan import format_plan, parse_plan
from shard_plans.documents.plan_check import check_plan
from shard_plans.errors import CheckpointError, PlanError, ReshardError
from shard_plans.families.agreement import differences, disagreements
from shard_plans.families.binding import Binding
from shard_plans.families.config_binding import bind_config
from shard_plans.families.family import load_family
from shard_plans.verbs import open_binding, open_model, plan_memory
from tests.checkpoints.architectures import ARCHITECTURES
from tests.checkpoints.variants import VARIANTS
from tests.conftest import MakeCheckpoint
from tests.tools import cli

CONFIGS = Path(__file__).parents[1] / "checkpoints" / "configs"
UNLIKE = {"qwen3_next", "kimi_k25_int4", "gpt_oss_mxfp4"}
"""Made without the layer for multi-token prediction that published ones store; without a list of what stays plain."""
TOTALS = {
    "kimi-k3": (497_220, 1_560_860_324_864),
    "deepseek-v3": (91_991, 688_574_839_360),
    "qwen3-235b": (36_945, 470_187_269_120),
}
"""Tensors and bytes of the published indexes (total_size)."""


def by_config(path: Path) -> Binding:
    config, digest = read_config(path)
    return bind_config(config, digest, path, load_family(config))


def rewritten(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return path


@pytest.mark.parametrize("name", TOTALS)
def test_totals_of_published_indexes(name: str) -> None:
    source = by_config(CONFIGS / f"{name}.json").source
    assert (len(source), source.total_bytes) == TOTALS[name]
    assert len(source.names) == len(set(source.names)) == len(source) == len(source.dtypes) == len(source.shapes)
    assert int(source.sizes.sum()) == source.total_bytes


@pytest.mark.parametrize("name", sorted({*VARIANTS, *ARCHITECTURES} - UNLIKE))
def test_every_tensor_of_a_checkpoint_is_announced(tiny: MakeCheckpoint, name: str) -> None:
    stored = open_binding(tiny(name))
    source, made = stored.checkpoint, by_config(tiny(name) / "config.json")
    announced = dict(zip(made.source.names, zip(made.source.dtypes, made.source.shapes, strict=True), strict=True))
    columns = zip(source.names, source.dtypes, source.shapes, strict=False)  # slices of stacked experts lie behind
    found = {name: (dtype, shape) for name, dtype, shape in columns}
    assert announced == found and made.source.total_bytes == source.total_bytes
    assert not list(differences(stored)) and disagreements(stored) == ()
    assert [p.role for p in made.parameters] == [p.role for p in stored.parameters]
    assert made.model == stored.model


def test_a_plan_from_the_config_is_the_checkpoints_own(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    folder = tiny("deepseek_v3_fp8")
    path = tmp_path / "config.json"
    path.write_bytes((folder / "config.json").read_bytes())
    for given in (path, tmp_path):
        plan = plan_memory(given, "1x4:80GB", pp=2)
        assert plan.checkpoint.fingerprint is None and plan.checkpoint.config is not None
        real = plan_memory(folder, "1x4:80GB", pp=2)
        assert real.checkpoint.config is None and real.ledger == plan.ledger and real.stages == plan.stages
        again = parse_plan(format_plan(plan))
        assert again.checkpoint == plan.checkpoint
        assert check_plan(again, open_binding(folder)).checkpoint == real.checkpoint
        assert check_plan(real, open_model(path)) == real


def test_convert_completes_a_plan_from_the_config(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    folder, plan = tiny("qwen3_moe_fp8"), tmp_path / "plan.yaml"
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    cli.run("plan-memory", tmp_path / "config.json", "--cluster", "1x2:80GB", "-o", plan)
    assert "\n  config: " in plan.read_text() and "fingerprint" not in plan.read_text()
    cli.run("convert", folder, tmp_path / "out", "--plan", plan)
    kept = (tmp_path / "out" / "plan.yaml").read_text()
    assert f"\n  fingerprint: {open_binding(folder).checkpoint.fingerprint}\n" in kept and "\n  config: " not in kept
    cli.run("check", tmp_path / "out", "--deep", folder)
    cli.run("convert", tmp_path / "config.json", tmp_path / "none", "--plan", plan, code=2)
    assert not (tmp_path / "none").exists()


def test_a_plan_from_another_config_is_refused(own_tiny: MakeCheckpoint, tmp_path: Path) -> None:
    folder = own_tiny("qwen3_moe_fp8")
    plan = plan_memory(folder / "config.json", "1x2:80GB")
    path = rewritten(folder, rope_theta=20000.0)
    with pytest.raises(PlanError, match=r"for another checkpoint: it names a config\.json of digest"):
        check_plan(plan, open_binding(folder))
    plan = plan_memory(path, "1x2:80GB")
    assert check_plan(plan, open_binding(folder)).checkpoint.fingerprint
    config = json.loads(path.read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["model.layers.1.mlp.experts"]
    rewritten(folder, **config)
    plan = plan_memory(path, "1x2:80GB")
    with pytest.raises(PlanError, match=r"config.json alone, but tensor model.layers.1.mlp.experts.0.gate_proj"):
        check_plan(plan, open_binding(folder))


def test_the_first_difference_is_named(own_tiny: MakeCheckpoint) -> None:
    folder = own_tiny("deepseek_v3_fp8")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"] = ["re:.*self_attn.*", "lm_head"]
    rewritten(folder, **config)
    message = (
        "tensor model.layers.0.self_attn.q_a_proj.weight is plain BF16 by config.json, "
        "F8_E4M3 with scales (fp8_block) by the file's header (15 weights differ so): the header counts"
    )
    assert message in open_model(folder).notes[0]
    for verb in (("plan-memory", folder, "--cluster", "1x1:80GB"), ("inspect", folder)):
        assert message in cli.run(*verb).stderr
    assert plan_memory(folder, "1x1:80GB").ledger is not None
    rewritten(folder, hidden_size=config["hidden_size"] * 2)
    ran = cli.run("plan-memory", folder, "--cluster", "1x1:80GB", code=2)
    assert "model.embed_tokens.weight has shape [256, 64], config.json makes it [256, 128]" in ran.stderr


def test_another_plain_type_is_noted(own_tiny: MakeCheckpoint) -> None:
    folder = own_tiny("llama")
    rewritten(folder, dtype="float16", torch_dtype="float16")
    (note,) = disagreements(open_binding(folder))
    assert "tensor model.embed_tokens.weight is F16 [256, 64] by config.json, BF16 [256, 64] by the file's" in note
    assert "(30 weights differ so)" in note
    ran = cli.run("plan-memory", folder, "--cluster", "1x1:80GB")
    assert note in ran.stderr


def test_what_counts_as_a_config_alone(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    folder = tiny("llama")
    assert config_alone(folder) is None and config_alone(folder / "config.json") == folder / "config.json"
    assert config_alone(folder / "model.safetensors.index.json") is None
    assert config_alone(tmp_path) is None
    (tmp_path / "config.json").write_text("{}")
    assert config_alone(tmp_path) == tmp_path / "config.json"
    (tmp_path / "model.safetensors").write_text("")
    assert config_alone(tmp_path) is None
    with pytest.raises(CheckpointError, match="doesn't exist"):
        config_alone(tmp_path / "gone")


@pytest.mark.parametrize(
    "text",
    ["[]", "3", "null", "{", "",
     '{"model_type": 3}', '{"model_type": "llama"}', '{"model_type": "x"}', '{"a": 1, "a": 2}',
     '{"model_type": ["llama"]}', '{"hidden_size": 8}'],
)  # fmt: skip
def test_what_is_no_config_is_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    for path in (tmp_path, tmp_path / "config.json"):
        ran = cli.run("plan-memory", path, "--cluster", "1x8:80GB", code=2)
        assert ran.stderr.count("\n") == 1 and "Traceback" not in ran.stderr


@pytest.mark.parametrize("value", [-1, 0, 1 << 60, 10**12, 10**40, 1.5, True, "8", [8], {}, None])
@pytest.mark.parametrize("name", TOTALS)
def test_sizes_that_cannot_be_are_refused_or_do_not_fit(tmp_path: Path, name: str, value: object) -> None:
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    text = config.get("text_config", config)
    keys = (
        "hidden_size",
        "num_hidden_layers",
        "moe_intermediate_size",
        "vocab_size",
        "num_experts",
        "n_routed_experts",
    )
    for key in keys:
        if key not in text:
            continue
        (tmp_path / "config.json").write_text(json.dumps(spoiled(config, text, key, value)))
        try:
            plan = plan_memory(tmp_path / "config.json", "4x8:80GB", tp=8, pp=4, ep=8)
        except ReshardError as error:
            assert len(str(error)) < 600
        else:
            assert value == 10**12 and not plan.fits


def spoiled(config: dict[str, Any], text: dict[str, Any], key: str, value: object) -> dict[str, Any]:
    if text is config:
        return {**config, key: value}
    return {**config, "text_config": {**text, key: value}}


def test_more_experts_a_token_than_there_are(tmp_path: Path) -> None:
    config = json.loads((CONFIGS / "qwen3-235b.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_experts_per_tok": 129}))
    with pytest.raises(ReshardError, match="a token goes to 129 experts, but there are 128"):
        open_model(tmp_path)


def test_a_tower_that_never_ends(tmp_path: Path) -> None:
    config = json.loads((CONFIGS / "kimi-k3.json").read_text())
    config["vision_config"]["vt_num_hidden_layers"] = 10**12
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ReshardError, match="1000000000000 places for block"):
        open_model(tmp_path)


def test_no_dtype_counts_as_bf16_and_says_so(own_tiny: MakeCheckpoint) -> None:
    path = own_tiny("llama") / "config.json"
    config = {key: value for key, value in json.loads(path.read_text()).items() if "dtype" not in key}
    path.write_text(json.dumps(config))
    binding = by_config(path)
    assert set(binding.source.dtypes) == {"BF16"} and "names no dtype" in binding.notes[0]
    path.write_text(json.dumps({**config, "dtype": "int3"}))
    with pytest.raises(ReshardError, match="dtype is 'int3'"):
        by_config(path)


def test_an_unknown_architecture_says_how_to_describe_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba9", "hidden_size": 8}')
    ran = cli.run("plan-memory", tmp_path, "--cluster", "1x8:80GB", code=2)
    assert "mamba9" in ran.stderr and "--family FILE" in ran.stderr and "docs/families.md" in ran.stderr
