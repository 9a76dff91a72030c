"""Parameters that vLLM's classes hold otherwise than they are stored: what is written, and every way back."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from converter.check import check
from converter.restore import restore
from converter.verbs import convert
from shard_plans.documents.manifest import read_manifest, read_shard_manifest
from shard_plans.errors import ManifestError, PlanError
from tests.checkpoints.store import read_tensors
from tests.conftest import MakeCheckpoint
from tests.engines.checkpoints import as_published, make_wide
from tests.engines.test_vllm_keys import loaded
from tests.tools import tamper
from tests.tools.converted import contents

LAYOUT = "vllm@0.33"


def test_linear_attention_in_float32(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    """Values of `A_log` are the stored ones in a wider type; the manifest says from which."""
    source, out = tiny("qwen3_next"), tmp_path / "out"
    convert(source, out, layout=LAYOUT, tp=2)
    stored, name = read_tensors(source), "model.layers.0.linear_attn.A_log"
    for rank, held in enumerate(loaded(out)):
        assert held[name].dtype == torch.float32
        assert torch.equal(held[name], stored[name].chunk(2)[rank].float())
    root = read_manifest(out)
    tensors = read_shard_manifest(out, root.files[0].name, root).tensors
    assert {piece.widened for tensor in tensors if tensor.name == name for piece in tensor.sources} == {"BF16"}


def test_experts_and_rotary_rows_of_llama4(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    """Experts output first; the rows of each query and key head: those of even number, then the others."""
    source, out = tiny("llama4_even"), tmp_path / "out"
    convert(source, out, layout=LAYOUT, tp=2)
    stored, layer = read_tensors(source), "model.layers.1."
    gate, up = stored[f"{layer}feed_forward.experts.gate_up_proj"].chunk(2, -1)
    for rank, held in enumerate(loaded(out)):
        mine = torch.cat([gate.chunk(2, -1)[rank], up.chunk(2, -1)[rank]], -1)
        assert torch.equal(held[f"{layer}feed_forward.experts.routed_experts.w13_weight"], mine.transpose(1, 2))
        rows = [stored[f"{layer}self_attn.{part}_proj.weight"].chunk(2)[rank] for part in "qkv"]
        heads = [part.reshape(-1, 16, part.shape[1]) for part in rows[:2]]
        apart = [torch.cat([head[:, 0::2], head[:, 1::2]], 1).flatten(0, 1) for head in heads]
        assert torch.equal(held[f"{layer}self_attn.qkv_proj.weight"], torch.cat([*apart, rows[2]]))


def test_biases_of_gpt_oss(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    """The experts' output bias is added once: where they are cut, the first rank alone has it."""
    source, out = tiny("gpt_oss"), tmp_path / "out"
    convert(source, out, layout=LAYOUT, tp=2)
    name = "model.layers.0.mlp.experts."
    first, second = loaded(out)
    assert torch.equal(first[f"{name}routed_experts.w2_bias"], read_tensors(source)[f"{name}down_proj_bias"])
    assert not second[f"{name}routed_experts.w2_bias"].any()


@pytest.mark.parametrize("name", ["llama4_even", "qwen3_next_wide", "ernie4_5_moe", "gpt_oss_wide"])
def test_other_layouts_are_made_of_it(name: str, own_tiny: MakeCheckpoint, tmp_path: Path) -> None:
    """Our own, and the engine's for more ranks, out of the engine's folder: what the checkpoint makes."""
    source, out = as_published(own_tiny(name)), tmp_path / "out"
    convert(source, out, layout=LAYOUT, tp=2)
    for number, sizes in enumerate(
        ({"layout": "reshard", "tp": 2, "ep": 2, "mtp": "drop"}, {"layout": LAYOUT, "tp": 4})
    ):
        again, straight = tmp_path / f"again{number}", tmp_path / f"straight{number}"
        convert(out, again, **sizes)  # type: ignore[arg-type]
        convert(source, straight, **sizes)  # type: ignore[arg-type]
        mine, theirs = contents(again), contents(straight)
        assert {n for n in theirs if n.endswith(".safetensors") and mine.get(n) != theirs[n]} == set()
        assert mine.keys() == theirs.keys()


def test_bytes_behind_a_wider_number_are_checked(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    """Digests made anew over a number that no stored one is: the deep check sees it."""
    source, out = tiny("qwen3_next"), tmp_path / "out"
    convert(source, out, layout=LAYOUT)
    root, name = read_manifest(out), "model.layers.0.linear_attn.A_log"
    with tamper.opened(out, root.files[0].name) as shard:
        data = bytearray(shard.data[name])
        data[0] ^= 1
        shard.data[name] = bytes(data)
    assert check(out).passed
    assert any(failure.tensor == name for failure in check(out, source).failures)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("axes", [0, 1], "as stored: .* differs"),
        ("axes", [1, 1], r"in the order \[1, 1\]"),
        ("view", [64, 95], "is read as|doesn't fill whole rows|is cut up to"),
    ],
)
def test_another_order_is_seen(key: str, value: list[int], words: str, tiny: MakeCheckpoint, tmp_path: Path) -> None:
    """A manifest that tells of another order than the data has."""
    source, out = tiny("llama4_even"), tmp_path / "out"
    convert(source, out, layout=LAYOUT)
    root, name = read_manifest(out), "model.layers.1.feed_forward.experts.routed_experts.w13_weight"
    with tamper.opened(out, root.files[0].name) as shard:
        shard.entry(name)["sources"][0]["arranged"][key] = value
    try:
        found = " ".join(failure.reason for failure in check(out, source).failures)
    except ManifestError as error:
        found = str(error)
    assert re.search(words, found), found


def test_scales_of_experts_that_are_cut_inside_a_block(tmp_path: Path) -> None:
    """Two ranks of 192 of 384 columns: blocks of 64, every scale repeated; the checkpoint comes back all the same."""
    source = make_wide("qwen3_moe", "fp8", tmp_path / "source", moe_intermediate_size=384)
    out, layer = tmp_path / "out", "model.layers.1.mlp.experts."
    convert(source, out, layout=LAYOUT, tp=2)
    stored = read_tensors(source)
    scales = {part: stored[f"{layer}0.{part}_proj.weight_scale_inv"] for part in ("gate", "up", "down")}
    finer = {part: scale.repeat_interleave(2, 0).repeat_interleave(2, 1) for part, scale in scales.items()}
    for rank, held in enumerate(loaded(out)):
        wanted = torch.cat([finer[part].chunk(2)[rank] for part in ("gate", "up")])
        assert torch.equal(held[f"{layer}routed_experts.w13_weight_scale_inv"][0], wanted)
        assert torch.equal(held[f"{layer}routed_experts.w2_weight_scale_inv"][0], finer["down"].chunk(2, 1)[rank])
    root = read_manifest(out)
    tensors = read_shard_manifest(out, root.files[0].name, root).tensors
    assert {tensor.block for tensor in tensors if "routed_experts.w" in tensor.name} == {(64, 64)}
    assert check(out, source).passed
    restore(out, tmp_path / "back")
    for file, data in contents(tmp_path / "back").items():
        assert data == (source / file).read_bytes(), file


def test_quantised_experts_are_not_turned(own_tiny: MakeCheckpoint, tmp_path: Path) -> None:
    source = own_tiny("gpt_oss_mxfp4")
    with pytest.raises(PlanError, match="its layout depends on the kernels"):
        convert(source, tmp_path / "out", layout=LAYOUT)
    config = json.loads((source / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "mxfp4"


def test_the_checkpoint_comes_back(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    """From an output of two stages and ranks, in blocks smaller than a head."""
    source, out = tiny("llama4_even"), tmp_path / "out"
    convert(source, out, layout=LAYOUT, tp=2, pp=2)
    with pytest.MonkeyPatch.context() as patch:
        for module in ("restore", "backward.deep"):
            patch.setattr(f"converter.{module}.BLOCK", 200)
        assert check(out, source).passed
        restore(out, tmp_path / "back")
    for file, data in contents(tmp_path / "back").items():
        assert data == (source / file).read_bytes(), file
