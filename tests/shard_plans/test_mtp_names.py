"""Multi-token-prediction layers under names of their own: bound, cut, converted and restored like any other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shard_plans.errors import CheckpointError
from shard_plans.families.agreement import differences
from shard_plans.verbs import open_binding
from tests.conftest import MakeCheckpoint
from tests.tools import cli

INDEX = "model.safetensors.index.json"


def with_mtp(folder: Path, spare: str = "") -> Path:
    """A Qwen3-Next checkpoint with the layer that published ones store: a full-attention layer under mtp.layers.0."""
    index = json.loads((folder / INDEX).read_text())
    files = {name: load_file(folder / name) for name in set(index["weight_map"].values())}
    every = {name: tensor for file in files.values() for name, tensor in file.items()}
    config = json.loads((folder / "config.json").read_text())
    kinds = config.get("layer_types") or []
    full = kinds.index("full_attention") if kinds else 3
    extra = {
        name.replace(f"model.layers.{full}.", "mtp.layers.0."): tensor.clone()
        for name, tensor in every.items()
        if name.startswith(f"model.layers.{full}.")
    }
    hidden = config["hidden_size"]
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        extra[f"mtp.{name}.weight"] = torch.randn(hidden).to(torch.bfloat16)
    extra["mtp.fc.weight"] = torch.randn(hidden, 2 * hidden).to(torch.bfloat16)
    extra.pop(spare, None)
    save_file(extra, folder / "model-mtp.safetensors", metadata={"format": "pt"})
    index["weight_map"] |= dict.fromkeys(extra, "model-mtp.safetensors")
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def test_bound_and_announced(own_tiny: MakeCheckpoint) -> None:
    folder = own_tiny("qwen3_next")
    assert any("none is stored" in note for note in open_binding(folder).notes)
    binding = open_binding(with_mtp(folder))
    mtp = [parameter for parameter in binding.parameters if parameter.stage == "mtp"]
    assert {p.layer for p in mtp} == {len(binding.model.forward_layers)}
    assert {"mtp.proj", "mtp.enorm", "mtp.hnorm", "mtp.norm", "attn.q", "experts.gate", "moe.router"} <= {
        p.role for p in mtp
    }
    assert sum(len(part.tensors) for p in mtp for part in p.parts) == sum(
        name.startswith("mtp.") for name in binding.checkpoint.names
    )
    assert not list(differences(binding))


def test_converted_and_restored(own_tiny: MakeCheckpoint, tmp_path: Path) -> None:
    folder = with_mtp(own_tiny("qwen3_next"))
    for name, options in (("keep", []), ("drop", ["--mtp", "drop"])):
        out = tmp_path / name
        cli.run("convert", folder, out, "--tp", 2, "--pp", 2, "--ep", 2, "--etp", 1, *options)
        cli.run("check", out, "--deep", folder)
    cli.run("restore", tmp_path / "keep", tmp_path / "again")
    for name in ("model-mtp.safetensors",):
        before, after = load_file(folder / name), load_file(tmp_path / "again" / name)
        assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize(
    "name", ["mtp.fc.weight", "mtp.layers.0.mlp.experts.0.up_proj.weight", "mtp.layers.0.mlp.gate.weight"]
)
def test_what_is_missing_is_named_as_it_is_stored(own_tiny: MakeCheckpoint, name: str) -> None:
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        open_binding(with_mtp(own_tiny("qwen3_next"), spare=name))


def test_a_second_layer_has_no_row(own_tiny: MakeCheckpoint) -> None:
    folder = with_mtp(own_tiny("qwen3_next"))
    tensors = load_file(folder / "model-mtp.safetensors")
    other = {name.replace("layers.0.", "layers.1."): tensor for name, tensor in tensors.items() if "layers.0." in name}
    save_file(other, folder / "model-other.safetensors", metadata={"format": "pt"})
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= dict.fromkeys(other, "model-other.safetensors")
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"mtp\.layers\.1\..* matches no row"):
        open_binding(folder)
