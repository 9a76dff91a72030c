"""Buffers that some checkpoints store though every engine computes them: taken along, and left out for engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from converter.verbs import check, restore
from shard_plans.errors import CheckpointError, FamilyError
from shard_plans.families.agreement import differences
from shard_plans.families.dims import parse_dim
from shard_plans.families.rows import parse_row, parse_section
from shard_plans.verbs import open_binding
from tests.conftest import MakeCheckpoint
from tests.tools import cli
from tests.tools.converted import converted

INDEX = "model.safetensors.index.json"
FILE = "model-buffers.safetensors"


def with_buffers(folder: Path, length: int = 8) -> Path:
    """The checkpoint with the frequencies of RoPE in every layer, as Kimi-K2-Instruct and Llama-2 store them."""
    index = json.loads((folder / INDEX).read_text())
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    names = [f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(layers)]
    save_file({name: torch.rand(length) for name in names}, folder / FILE, metadata={"format": "pt"})
    index["weight_map"] |= dict.fromkeys(names, FILE)
    (folder / INDEX).write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
@pytest.mark.parametrize("length", [4, 7])
def test_taken_along_and_restored(own_tiny: MakeCheckpoint, tmp_path: Path, name: str, length: int) -> None:
    folder = with_buffers(own_tiny(name), length)
    binding = open_binding(folder)
    assert sum(p.role == "attn.rope_freq" for p in binding.parameters) == len(binding.model.layers)
    assert not list(differences(binding))
    converted(folder, tmp_path / "out", {"tp": 2, "pp": 2})
    assert check(tmp_path / "out", deep=folder).passed
    restore(tmp_path / "out", tmp_path / "again")
    assert (tmp_path / "again" / FILE).read_bytes() == (folder / FILE).read_bytes()


def test_read_by_no_block(own_tiny: MakeCheckpoint, tmp_path: Path) -> None:
    converted(with_buffers(own_tiny("llama")), tmp_path / "out", {"tp": 2})
    assert cli.run("verify-and-run", tmp_path / "out", "--json").json["passed"]


def test_left_out_for_engines(own_tiny: MakeCheckpoint, tmp_path: Path) -> None:
    folder = with_buffers(own_tiny("llama"))
    cli.run("convert", folder, tmp_path / "out", "--tp", 2, "--layout", "vllm@0.33")
    skipped = json.loads((tmp_path / "out" / "manifest.json").read_text())["skipped"]
    assert {item["reason"] for item in skipped} == {"a buffer that vllm@0.33 computes"}
    assert all("inv_freq" not in key for path in (tmp_path / "out").glob("*.safetensors") for key in load_file(path))
    cli.run("check", tmp_path / "out", "--deep", folder)


def test_a_length_that_isnt_stated(own_tiny: MakeCheckpoint) -> None:
    folder = own_tiny("llama")
    with_buffers(folder)
    tensors = load_file(folder / FILE)
    tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.rand(2, 2)
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model.layers.1.self_attn.rotary_emb.inv_freq has shape \[2, 2\]"):
        open_binding(folder)


def test_any_stands_alone_in_rows_that_may_be_absent() -> None:
    for text in ("any + 1", "2*any", "tp(any)"):
        with pytest.raises(FamilyError, match="`any`"):
            parse_dim(text)
    for flags in ("", "quant optional"):
        with pytest.raises(FamilyError, match="`any` is for optional rows"):
            parse_row("a.weight", f"attn.a [any, hidden] {flags}", parse_section("layer"), "model.layers.{layer}.")
