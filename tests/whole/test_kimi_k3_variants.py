"""Kimi K3 in other sizes: the number of experts and the latent width are the config's, and nothing else changes."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from converter.verbs import check, convert, restore
from runtime.verbs import verify_and_run
from shard_plans.errors import CheckpointError
from tests.checkpoints import kimi_k3
from tests.tools.converted import contents


def make(folder: Path, monkeypatch: pytest.MonkeyPatch, experts: int = 8, latent: int = 64) -> Path:
    """A tiny K3 with vision tower, of other sizes."""
    config = copy.deepcopy(kimi_k3.CONFIG)
    config["text_config"] |= {"num_experts": experts, "routed_expert_hidden_size": latent}
    for name, value in {"CONFIG": config, "EXPERTS": experts, "LATENT": latent}.items():
        monkeypatch.setattr(kimi_k3, name, value)
    kimi_k3.make_kimi_k3(folder)
    return folder


@pytest.mark.parametrize(("experts", "latent"), [(512, 64), (8, 96), (5, 32)])
def test_other_sizes_work_from_conversion_to_logits(
    experts: int, latent: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = make(tmp_path / "k3", monkeypatch, experts, latent), tmp_path / "out"
    convert(source, out, tp=2, dp=2, ep=4, pp=2)
    result = verify_and_run(out, source)
    assert result.passed, result.checks
    worst = {check.name: check.worst for check in result.checks}
    assert worst["routing"] == 0 and (worst["logits"] or 1) < 1e-5
    assert check(out, source).passed
    restore(out, tmp_path / "back")
    kept = {name: data for name, data in contents(source).items() if not name.startswith(("expected", "reference"))}
    assert contents(tmp_path / "back") == kept


def test_a_wrong_type_is_refused_by_name_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make(tmp_path / "k3", monkeypatch)
    path = source / "model-00002-of-000007.safetensors"
    tensors = load_file(path)
    name = "language_model.model.layers.1.self_attn.dt_bias"
    save_file(tensors | {name: tensors[name].to(torch.bfloat16)}, path)
    with pytest.raises(CheckpointError, match=f"{name} is stored as BF16, allowed: F32"):
        convert(source, tmp_path / "out", tp=2)
    assert not (tmp_path / "out").exists()
