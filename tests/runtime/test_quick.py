"""--quick takes layers of every kind, finds what is wrong in them, and says what it left out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import reshard
from runtime.checking import sample as sampling
from runtime.checking.checks import AIM
from runtime.checking.sample import LEAST, only, sample
from shard_plans.errors import RuntimeFault
from shard_plans.families.family import load_family
from shard_plans.families.model import Model, bind_model
from tests.checkpoints.giant import CONFIGS
from tests.conftest import MakeCheckpoint
from tests.tools import tamper
from tests.tools.cli import RunCli
from tests.tools.kimi import TINY
from tests.tools.sharded import checks, convert_tiny, failed


def model_of(name: str) -> Model:
    config = json.loads((CONFIGS / name).read_text())
    return bind_model(load_family(config), config)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models have fewer layers than are taken at least."""
    monkeypatch.setattr(sampling, "LEAST", 2)


def test_the_sample_has_both_ends_and_every_kind() -> None:
    model = model_of("deepseek-v3.json")
    taken = sample(model, "a")
    assert taken == sample(model, "a") != sample(model, "b")
    assert len(taken) == LEAST and {0, 3, 60} <= set(taken)  # three dense layers, then mixtures
    assert [layer.index for layer in only(model, taken).forward_layers] == list(taken)


def test_a_layer_with_a_window_is_of_a_kind_of_its_own() -> None:
    model = model_of("deepseek-v3.json")
    layers = list(model.layers)
    layers[40] = replace(layers[40], words={**layers[40].words, "window": 128})
    assert all(40 in sample(replace(model, layers=tuple(layers)), seed) for seed in "abcdef")


def test_where_the_stream_grows_the_first_layers_are_taken() -> None:
    model = model_of("kimi-k3.json")
    taken = sample(model, "a")
    assert taken == tuple(range(len(taken))) and len(taken) < len(model.forward_layers) / 2
    kinds = {layer.words["attn"] for layer in model.forward_layers}
    assert {layer.words["attn"] for layer in only(model, taken).forward_layers} == kinds


@pytest.mark.usefixtures("few")
def test_a_few_layers_are_run_and_the_others_are_named(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    out, source = tmp_path / "out", tiny("mixtral")
    convert_tiny(source, out, {"tp": 2, "pp": 3, "ep": 2})
    whole, result = reshard.verify_and_run(out, source), reshard.verify_and_run(out, source, quick=True)
    assert result.passed and result.figures["quick"] == {"layers": [0, 2], "of": 3}
    assert [layer.layer for layer in result.layers] == [0, 2]
    assert result.figures["bytes_read"] < whole.figures["bytes_read"] * 0.8
    assert "bytes" not in checks(result)
    for name in ("layers", "operators", "decode", "hidden", "logits"):
        assert (checks(result)[name].worst or 1) < AIM
    said = " ".join(result.not_checked)
    assert "Only layers 0,2 of 3" in said and "Bytes weren't compared" in said and "experts" in said
    tamper.swap_halves(out, "stage-1-ep-0-etp-0.safetensors", "layers.1.experts.gate_up")
    assert reshard.verify_and_run(out, source, quick=True).passed  # layer 1 isn't looked at
    tamper.swap_halves(out, "stage-2-ep-0-etp-0.safetensors", "layers.2.experts.gate_up")
    found = reshard.verify_and_run(out, source, quick=True)
    assert {"layers", "operators", "logits"} <= failed(found)
    assert "layer 2" in checks(found)["layers"].where


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("name", ["glm_moe_dsa", "gpt_oss", "qwen3_next"])
def test_other_families(name: str, tiny: MakeCheckpoint, tmp_path: Path) -> None:
    convert_tiny(tiny(name), tmp_path / "out", {"tp": 2, "pp": 2})
    result = reshard.verify_and_run(tmp_path / "out", tiny(name), quick=True)
    assert result.passed, result.checks
    assert 2 <= len(result.figures["quick"]["layers"]) <= result.figures["quick"]["of"]


@pytest.mark.usefixtures("few")
def test_a_stream_that_grows_goes_on_over_stages_that_run_nothing(tmp_path: Path) -> None:
    convert_tiny(TINY, tmp_path / "out", {"pp": 4})
    result = reshard.verify_and_run(tmp_path / "out", TINY, quick=True, input_ids=[1, 2, 3, 4, 5])
    quick = result.figures["quick"]
    assert result.passed and quick["layers"] == list(range(len(quick["layers"]))) and len(quick["layers"]) < quick["of"]


def test_what_a_few_layers_cannot_do_is_refused(tiny: MakeCheckpoint, tmp_path: Path, run_cli: RunCli) -> None:
    convert_tiny(tiny("llama"), tmp_path / "out", {"tp": 2})
    with pytest.raises(RuntimeFault, match="--quick contradicts --max-new-tokens"):
        reshard.verify_and_run(tmp_path / "out", quick=True, max_new_tokens=3)
    ran = run_cli("verify-and-run", tmp_path / "out", "--quick", "--reference", tiny("llama"))
    assert ran.stdout.startswith("passed: ") and "(quick: 3 of 3 layers)" in ran.stdout
