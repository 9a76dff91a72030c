"""inspect: what a path is, and what is in it; what isn't known is None."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

import reshard
from shard_plans.documents.plan import write_plan
from shard_plans.errors import CheckpointError, ManifestError, PlanError, ReshardError
from shard_plans.families.family import FOLDER
from shard_plans.inspect import inspect
from shard_plans.memory.cluster import parse_cluster
from shard_plans.search.search import search
from tests.conftest import MakeCheckpoint
from tests.tools.converted import bound

FAMILIES = ["llama", "qwen2", "qwen3", "mixtral", "qwen3_moe", "qwen3_moe_fp8", "deepseek_v3_fp8"]


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoint_and_config_agree(tiny: MakeCheckpoint, family: str) -> None:
    folder = tiny(family)
    found, config = inspect(folder), inspect(folder / "config.json")
    checkpoint = bound(folder).checkpoint
    assert (found.kind, config.kind) == ("checkpoint", "config")
    assert found.family == config.family == family.removesuffix("_fp8")
    assert (found.tensors, found.bytes) == (len(checkpoint), checkpoint.total_bytes)
    assert found.layers == config.layers == 3 and found.experts == config.experts
    assert found.parameters == config.parameters
    assert found.groups is not None
    assert sum(group.tensors for group in found.groups) == found.tensors
    assert sum(group.bytes for group in found.groups) == found.bytes
    assert (config.tensors, config.bytes, config.groups) == (found.tensors, found.bytes, found.groups)
    assert json.loads(json.dumps(asdict(found)))["groups"][0]["name"] == "embed"
    if not family.endswith("_fp8"):
        assert found.parameters is not None and found.bytes is not None
        plain = all(set(group.dtypes) <= {"BF16"} for group in found.groups)
        assert not plain or found.parameters * 2 == found.bytes


def test_groups_and_scales(tiny: MakeCheckpoint) -> None:
    found = inspect(tiny("deepseek_v3_fp8"))
    groups = {group.name: group for group in found.groups or ()}
    assert list(groups) == ["embed", "attn", "ffn", "mlp", "moe", "experts", "shared", "norm", "head"]
    assert groups["experts"].tensors == 2 * 16 * 3 * 2 and groups["experts"].dtypes == ("F32", "F8_E4M3")
    values = 2 * 16 * 3 * 64 * 32
    assert groups["experts"].bytes > values and found.parameters == inspect(tiny("deepseek_v3_fp8")).parameters
    mtp = inspect(tiny("deepseek_v3_mtp"))
    config = inspect(tiny("deepseek_v3_mtp") / "config.json")
    assert mtp.layers == config.layers == 3 and "mtp" in {group.name for group in mtp.groups or ()}
    assert config.parameters == mtp.parameters and "multi-token-prediction" in config.notes[0]


def test_an_unknown_architecture_is_null_with_the_reason(own_tiny: MakeCheckpoint) -> None:
    folder = own_tiny("llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "mamba9"}))
    for found in (inspect(folder), inspect(folder / "config.json")):
        assert found.family is None and found.parameters is None and found.layers is None and found.groups is None
        assert "mamba9" in found.notes[0] and "llama" in found.notes[0]
    assert inspect(folder).tensors == 30
    assert inspect(folder, FOLDER / "llama.yaml").family == "llama"
    with pytest.raises(ReshardError):
        inspect(folder, FOLDER / "deepseek_v3.yaml")


def test_a_plan(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    binding = bound(tiny("mixtral"))
    write_plan(search(binding, parse_cluster("1x4:80GB"), {"tp": 2, "pp": 2, "ep": 2}), tmp_path / "p.yaml")
    found = inspect(tmp_path / "p.yaml")
    assert (found.kind, found.family, found.layers, found.experts) == ("plan", "mixtral", 3, 8)
    assert (found.tensors, found.bytes) == (len(binding.checkpoint), binding.checkpoint.total_bytes)
    assert found.parallel == {"tp": 2, "pp": 2, "dp": 1, "ep": 2, "etp": 1, "world": 4}
    (tmp_path / "p.yaml").write_text("reshard_plan: 1\n")
    with pytest.raises(PlanError, match="line 1"):
        inspect(tmp_path / "p.yaml")


def test_an_output(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    out = tmp_path / "out"
    reshard.convert(tiny("deepseek_v3_fp8"), out, tp=2, dp=2, ep=2, etp=1)
    found = inspect(out)
    assert (found.kind, found.family, found.layers, found.experts) == ("output", "deepseek_v3", 3, 16)
    assert found.groups is not None and found.bytes == sum(group.bytes for group in found.groups)
    assert {group.name for group in found.groups} >= {"embed", "attn", "experts", "shared", "norm", "head"}
    assert found.parallel == {"tp": 2, "pp": 1, "dp": 2, "ep": 2, "etp": 1, "world": 4}
    assert found.ranks is not None and [rank.rank for rank in found.ranks] == [0, 1, 2, 3]
    for rank in found.ranks:
        assert rank.bytes == sum((out / name).stat().st_size for name in rank.files)
    assert inspect(out / "manifest.json") == inspect(out / "plan.yaml") == found
    (out / "manifest.json").write_text("{}")
    with pytest.raises(ManifestError):
        inspect(out)


def test_what_is_nothing_known_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("")
    for path, message in (
        (tmp_path / "gone", "doesn't exist"),
        (tmp_path / "x.txt", "neither a folder"),
        (tmp_path, r"has neither config\.json .* nor manifest\.json"),
    ):
        with pytest.raises(CheckpointError, match=message):
            inspect(path)
