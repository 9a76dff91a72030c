"""The demo: its checkpoint is what it says, its story ends well, and a fault ends it badly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from converter.check import CheckResult, check
from runtime.demo import steps as demo_steps
from runtime.demo.checkpoint import CONFIG, make_demo_checkpoint
from runtime.demo.story import run_demo
from tests.checkpoints.store import INDEX, read_tensors
from tests.tools.cli import RunCli
from tests.tools.refusals import refused


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "checkpoint"
    make_demo_checkpoint(folder)
    return folder


def test_the_checkpoint_is_deterministic(checkpoint: Path, tmp_path: Path) -> None:
    make_demo_checkpoint(tmp_path)
    assert all((tmp_path / path.name).read_bytes() == path.read_bytes() for path in checkpoint.iterdir())


def test_the_checkpoint_has_what_makes_it_hard(checkpoint: Path) -> None:
    tensors = read_tensors(checkpoint)
    index = json.loads((checkpoint / INDEX).read_text())
    assert set(index["weight_map"]) == set(tensors)
    assert len(set(index["weight_map"].values())) > 1
    assert 20e6 < index["metadata"]["total_size"] < 60e6
    assert tensors["model.layers.1.mlp.gate.e_score_correction_bias"].dtype is torch.float32
    assert tensors["model.layers.4.eh_proj.weight"].dtype is torch.bfloat16  # multi-token prediction
    assert "model.layers.0.mlp.gate_proj.weight" in tensors  # dense
    assert "model.layers.1.mlp.shared_experts.up_proj.weight_scale_inv" in tensors
    down = "model.layers.1.mlp.experts.15.down_proj.weight"
    assert tensors[down].dtype is torch.float8_e4m3fn
    assert tensors[down].shape == (512, 320)  # two and a half blocks
    assert tensors[down + "_scale_inv"].shape == (4, 3)


def plain(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """What the forward pass uses, dequantised."""
    for name, tensor in tensors.items():
        if not name.endswith("_scale_inv") and not name.startswith(f"model.layers.{CONFIG['num_hidden_layers']}."):
            scales = tensors.get(name + "_scale_inv")
            if scales is not None:
                grid = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
                tensor = tensor.float() * grid[: tensor.shape[0], : tensor.shape[1]]
            yield name, tensor


def test_shards_agree_with_transformers(checkpoint: Path, run_cli: RunCli, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from tests.checkpoints.reference import reference
    from tests.checkpoints.tiny import load, quiet
    from tests.checkpoints.variants import VARIANTS

    quiet()
    model = load(VARIANTS["deepseek_v3"], dict(plain(read_tensors(checkpoint))), CONFIG)
    expected = reference(model, torch.Generator().manual_seed(1))
    save_file({"input_ids": expected["input_ids"]}, tmp_path / "ids.safetensors")
    run_cli("convert", checkpoint, tmp_path / "out", "--tp", 2, "--pp", 2, "--ep", 2)
    files = ("--input-ids", tmp_path / "ids.safetensors", "--logits-out", tmp_path / "logits.safetensors")
    run_cli("verify-and-run", tmp_path / "out", *files)
    logits = load_file(tmp_path / "logits.safetensors")["logits"]
    assert (logits - expected["logits"][0]).norm() < 1e-5 * expected["logits"].norm()


def test_the_story_ends_well(run_cli: RunCli, tmp_path: Path) -> None:
    ran = run_cli("demo", "-o", tmp_path / "demo")
    for number in range(1, len(demo_steps.STORY) + 1):
        assert f"\n{number}. " in ran.stdout
    assert "failed" not in ran.stdout
    assert (tmp_path / "demo" / "plan.yaml").exists()
    assert run_cli("check", tmp_path / "demo" / "shards", "--json").json["passed"] is True


def test_a_fault_ends_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from rich.console import Console

    def blind(out: Path, deep: Path | None = None) -> CheckResult:
        return check(out.parent / "shards", deep)

    monkeypatch.setattr(demo_steps, "check_output", blind)  # it never sees the copy with the flipped bit
    result = run_demo(tmp_path, Console(quiet=True))
    assert not result.passed
    assert [step.passed for step in result.steps] == [True] * 6 + [False]


def test_a_used_folder_is_refused(run_cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    refused(run_cli("demo", "-o", tmp_path, code=2), "mine.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
