"""The makers themselves: a checkpoint that hides a fault would make every test that reads it worthless."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoints import cache, fp8
from tests.checkpoints.store import INDEX, read_tensors
from tests.checkpoints.variants import MAIN, VARIANTS
from tests.conftest import MakeCheckpoint


@pytest.mark.parametrize("name", VARIANTS)
def test_every_stored_tensor_matters(name: str, tiny: MakeCheckpoint) -> None:
    from tests.checkpoints.reference import dead_tensors
    from tests.checkpoints.tiny import reload

    expected = load_file(tiny(name) / "reference.safetensors")
    assert torch.isfinite(expected["logits"]).all()
    assert 0.5 < expected["logits"].std() < 2
    model = reload(name, tiny(name))
    with torch.no_grad():
        again = model(input_ids=expected["input_ids"], use_cache=False).logits
    assert (again - expected["logits"]).norm() < 1e-6 * expected["logits"].norm()
    assert dead_tensors(model, expected) == {}


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_routers_use_most_experts(name: str, tiny: MakeCheckpoint) -> None:
    config = json.loads((tiny(name) / "config.json").read_text())
    experts = config.get("n_routed_experts") or config.get("num_experts") or config["num_local_experts"]
    expected = load_file(tiny(name) / "reference.safetensors")
    routings = [tensor for key, tensor in expected.items() if key.endswith(".indices")]
    assert len(routings) == 3 - config.get("first_k_dense_replace", 0)
    assert all(routing.unique().numel() > 0.8 * experts for routing in routings)


def test_router_biases_stay_fp32_and_need_it(tiny: MakeCheckpoint) -> None:
    biases = [
        t for name, t in read_tensors(tiny("deepseek_v3_fp8")).items() if name.endswith("e_score_correction_bias")
    ]
    assert len(biases) == 2
    assert all(bias.dtype is torch.float32 and not torch.equal(bias, bias.bfloat16().float()) for bias in biases)


def test_fp8_ends_in_partial_blocks(tiny: MakeCheckpoint) -> None:
    tensors = read_tensors(tiny("deepseek_v3_fp8"))
    weight = tensors["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"]
    assert weight.dtype is torch.float8_e4m3fn
    assert weight.shape[0] % fp8.BLOCK == 8
    assert tensors["model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"].shape == (2, 4)


def test_fp8_is_within_its_rounding() -> None:
    weight = torch.randn(40, 50, generator=torch.Generator().manual_seed(0))
    stored, scales, plain = fp8.quantize(weight)
    assert stored.shape == plain.shape == weight.shape
    assert scales.shape == (3, 4)
    assert ((plain - weight).abs() <= weight.abs() / 16 + scales.max() * 2**-9).all()


def test_mtp_layer_lies_behind_the_last(tiny: MakeCheckpoint) -> None:
    names = [name for name in read_tensors(tiny("deepseek_v3_mtp")) if name.startswith("model.layers.3.")]
    assert "model.layers.3.eh_proj.weight" in names
    assert "model.layers.3.mlp.experts.15.down_proj.weight_scale_inv" in names


def test_folders_are_as_published(tiny: MakeCheckpoint) -> None:
    for name in MAIN:
        index = json.loads((tiny(name) / INDEX).read_text())
        assert len(set(index["weight_map"].values())) > 1
        assert set(index["weight_map"]) == set(read_tensors(tiny(name)))
    assert not (tiny("llama_single") / INDEX).exists()
    assert (tiny("llama_single") / "model.safetensors").exists()


def test_an_interrupted_maker_leaves_nothing(tmp_path: Path) -> None:
    def fails(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.made(tmp_path, "broken", fails)
    assert list((tmp_path / cache.key()).iterdir()) == []


def test_older_keys_are_removed(tmp_path: Path) -> None:
    (tmp_path / "older").mkdir()
    folder = cache.made(tmp_path, "new", lambda folder: None)
    assert folder.is_dir()
    assert not (tmp_path / "older").exists()
