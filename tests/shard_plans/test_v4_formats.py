"""DeepSeek-V4 as published: FP8 blocks and packed FP4 experts in one checkpoint, scales in the place of `.weight`."""

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
DENSE = (".wq_a.weight", ".wq_b.weight", ".wkv.weight", ".wo_a.weight", ".wo_b.weight")
BLOCK = 16


def published(folder: Path, experts: str = "fp4", lost: str = "") -> Path:
    """The tiny checkpoint with the storage that V4 is published in: random codes, random powers of two."""
    index = json.loads((folder / INDEX).read_text())
    generator = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 120, shape, generator=generator, dtype=torch.uint8)

    for file in sorted(set(index["weight_map"].values())):
        stored = {}
        for name, tensor in load_file(folder / file).items():
            routed, scale = ".ffn.experts." in name, name.removesuffix(".weight") + ".scale"
            dense = (name.endswith(DENSE) and ".compressor." not in name) or ".shared_experts." in name
            if routed and experts == "fp4":
                rows, columns = tensor.shape
                stored[name] = codes(rows, columns // 2).view(torch.int8)
                stored[scale] = codes(rows, columns // 32).view(torch.float8_e8m0fnu)
            elif dense or routed:
                rows, columns = tensor.shape
                stored[name] = codes(rows, columns).view(torch.float8_e4m3fn)
                stored[scale] = codes(-(-rows // BLOCK), -(-columns // BLOCK)).view(torch.float8_e8m0fnu)
            else:
                stored[name] = tensor
        stored.pop(lost, None)
        save_file(stored, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(stored, file)
    (folder / INDEX).write_text(json.dumps({**index, "weight_map": weight_map}))
    config = json.loads((folder / "config.json").read_text())
    quantised = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [BLOCK, BLOCK]}
    config |= {"quantization_config": quantised, "expert_dtype": experts}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("experts", ["fp4", "fp8"])
def test_both_formats_are_bound_and_announced(own_tiny: MakeCheckpoint, experts: str) -> None:
    binding = open_binding(published(own_tiny("deepseek_v4"), experts))
    formats = {(p.group, p.format.name) for p in binding.parameters if p.format is not None}
    routed = "fp4_scale" if experts == "fp4" else "fp8_scale"
    assert formats == {("attn", "fp8_scale"), ("index", "fp8_scale"), ("shared", "fp8_scale"), ("experts", routed)}
    assert not list(differences(binding))


def test_converted_checked_and_restored(own_tiny: MakeCheckpoint, tmp_path: Path) -> None:
    folder = published(own_tiny("deepseek_v4"))
    cli.run("convert", folder, tmp_path / "out", "--tp", 2, "--ep", 2, "--etp", 1)
    cli.run("check", tmp_path / "out", "--deep", folder)
    cli.run("restore", tmp_path / "out", tmp_path / "again")
    for file in folder.glob("model-*.safetensors"):
        before, after = load_file(file), load_file(tmp_path / "again" / file.name)
        assert before.keys() == after.keys()
        for name, tensor in before.items():
            assert tensor.dtype == after[name].dtype
            assert torch.equal(tensor.view(torch.uint8), after[name].view(torch.uint8)), name


@pytest.mark.parametrize("lost", ["layers.1.attn.wq_a.scale", "layers.1.ffn.experts.3.w1.scale"])
def test_a_lost_scale_is_named(own_tiny: MakeCheckpoint, lost: str) -> None:
    with pytest.raises(CheckpointError, match=lost.replace(".", r"\.")):
        open_binding(published(own_tiny("deepseek_v4"), lost=lost))
