"""DeepSeek's mp folders: a strict loader, written from the contract alone, compares every rank with the source."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from converter.check import check
from converter.restore import restore
from converter.verbs import convert
from runtime.opened import open_output
from shard_plans.errors import PlanError, RuntimeFault
from tests.checkpoints.store import read_tensors
from tests.conftest import MakeCheckpoint
from tests.tools.converted import contents

Tensors = dict[str, Tensor]
Split = dict[str, int | None]
"""Name in the folder -> dimension that is cut, or None: every rank holds it whole."""
NAMES = ("deepseek_v3_wide", "deepseek_v3_wide_fp8", "deepseek_v32_wide")


def modules(config: dict[str, Any]) -> Iterator[tuple[str, str, int | None]]:
    """Of the inference code's model: module, the stored one, and the dimension that ranks share (without experts)."""
    yield "embed", "model.embed_tokens", 0
    for layer in range(config["num_hidden_layers"]):
        here, there = f"layers.{layer}.", f"model.layers.{layer}."
        yield here + "attn_norm", there + "input_layernorm", None
        yield here + "ffn_norm", there + "post_attention_layernorm", None
        for name, stored, cut in (
            ("wq_a", "q_a_proj", None), ("q_norm", "q_a_layernorm", None), ("wq_b", "q_b_proj", 0),
            ("wkv_a", "kv_a_proj_with_mqa", None), ("kv_norm", "kv_a_layernorm", None), ("wkv_b", "kv_b_proj", 0),
            ("wo", "o_proj", 1),
        ):  # fmt: skip
            yield f"{here}attn.{name}", f"{there}self_attn.{stored}", cut
        for name in ("wq_b", "wk", "k_norm", "weights_proj") if "index_n_heads" in config else ():
            yield f"{here}attn.indexer.{name}", f"{there}self_attn.indexer.{name}", None
        ways = (("w1", "gate_proj", 0), ("w2", "down_proj", 1), ("w3", "up_proj", 0))
        dense = layer < config["first_k_dense_replace"]
        for name, stored, cut in ways:
            yield (
                f"{here}ffn.{name}" if dense else f"{here}ffn.shared_experts.{name}",
                f"{there}mlp.{stored}" if dense else f"{there}mlp.shared_experts.{stored}",
                cut,
            )
        if not dense:
            yield here + "ffn.gate", there + "mlp.gate", None
    yield "norm", "model.norm", None
    yield "head", "lm_head", 0


def expected(stored: Tensors, config: dict[str, Any], rank: int, world: int) -> Tensors:
    """What rank `rank` of `world` must hold, by slicing the source."""
    found: Tensors = {}
    leaves = {"weight": "weight", "weight_scale_inv": "scale", "bias": "bias", "e_score_correction_bias": "bias"}
    for module, source, cut in modules(config):
        for leaf, name in leaves.items():
            tensor = stored.get(f"{source}.{leaf}")
            if tensor is not None:
                found[f"{module}.{name}"] = tensor if cut is None else tensor.chunk(world, cut)[rank]
    share = config["n_routed_experts"] // world
    for layer in range(config["first_k_dense_replace"], config["num_hidden_layers"]):
        for expert in range(rank * share, (rank + 1) * share):
            for name, source in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
                for leaf, new in list(leaves.items())[:2]:
                    tensor = stored.get(f"model.layers.{layer}.mlp.experts.{expert}.{source}.{leaf}")
                    if tensor is not None:
                        found[f"layers.{layer}.ffn.experts.{expert}.{name}.{new}"] = tensor
    return found


def load_strictly(folder: Path, wanted: Tensors, rank: int, world: int) -> None:
    """Raise unless the rank's file holds exactly these names, shapes, types and values."""
    held = load_file(folder / f"model{rank}-mp{world}.safetensors")
    if held.keys() != wanted.keys():
        raise ValueError(f"names differ: {sorted(held.keys() ^ wanted.keys())[:3]}")
    for name, tensor in wanted.items():
        if (held[name].shape, held[name].dtype) != (tensor.shape, tensor.dtype):
            raise ValueError(f"{name} is {held[name].dtype} {list(held[name].shape)}")
        if not torch.equal(held[name].view(torch.uint8), tensor.contiguous().view(torch.uint8)):
            raise ValueError(f"{name} holds other values")


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("name", NAMES)
def test_a_strict_loader_accepts_every_rank(name: str, world: int, tiny: MakeCheckpoint, tmp_path: Path) -> None:
    source, out = tiny(name), tmp_path / "out"
    convert(source, out, tp=world, ep=world, layout="deepseek-mp")
    stored, config = read_tensors(source), json.loads((source / "config.json").read_text())
    for rank in range(world):
        load_strictly(out, expected(stored, config, rank, world), rank, world)
    assert check(out, source).passed
    if world == 4:
        restore(out, tmp_path / "back")
        back = contents(tmp_path / "back")
        if "fp8" not in name:  # there the layers for multi-token prediction are missing
            assert all(data == (source / file).read_bytes() for file, data in back.items())
        with pytest.raises(ValueError, match=r"names differ|other values"):  # the loader can fail: another rank's file
            load_strictly(out, expected(stored, config, 1, world), 0, world)


def test_exchanged_ranks_and_halves_are_found(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    source, out = tiny("deepseek_v3_wide"), tmp_path / "out"
    convert(source, out, tp=2, ep=2, layout="deepseek-mp")
    first, second = out / "model0-mp2.safetensors", out / "model1-mp2.safetensors"
    whole = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(whole)
    assert not check(out, source).passed
    held = load_file(second)
    gate, up = "layers.0.ffn.w1.weight", "layers.0.ffn.w3.weight"
    save_file(held | {gate: held[up], up: held[gate]}, first)
    assert not check(out, source).passed


def test_files_beside_the_shards(own_tiny: MakeCheckpoint, tmp_path: Path) -> None:
    """The tokenizer's files lie where the inference code looks for them."""
    source = own_tiny("deepseek_v3_wide")
    (source / "tokenizer.json").write_text("{}")
    (source / "tokenizer_config.json").write_text('{"a": 1}')
    convert(source, tmp_path / "out", tp=2, ep=2, layout="deepseek-mp")
    assert (tmp_path / "out" / "tokenizer_config.json").read_text() == '{"a": 1}'
    assert check(tmp_path / "out", source).passed
    (tmp_path / "out" / "tokenizer.json").write_text("[]")
    assert [failure.file for failure in check(tmp_path / "out").failures] == ["tokenizer.json"]


@pytest.mark.parametrize(
    ("name", "sizes", "words"),
    [
        ("deepseek_v3_wide", {"tp": 2}, "give --tp M --ep M and nothing else"),
        ("deepseek_v3_wide", {"tp": 2, "ep": 2, "pp": 2}, "give --tp M --ep M and nothing else"),
        ("deepseek_v3", {"tp": 2, "ep": 2}, "a router with bias at hidden size 64"),
        ("qwen3_moe", {"tp": 2, "ep": 2}, "k_proj.weight; the inference code has no module"),
        ("llama", {"tp": 2}, "give --tp M --ep M"),
    ],
)
def test_what_it_cannot_hold_is_refused(
    name: str, sizes: dict[str, int], words: str, tiny: MakeCheckpoint, tmp_path: Path
) -> None:
    with pytest.raises(PlanError, match=words):
        convert(tiny(name), tmp_path / "out", layout="deepseek-mp", **sizes)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_block_counts_that_do_not_divide_are_refused(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    """A head has 24 rows of queries: two of them end with a block of 16, one doesn't."""
    source = tiny("deepseek_v3_wide_ragged")
    convert(source, tmp_path / "fits", tp=4, ep=4, layout="deepseek-mp")
    with pytest.raises(PlanError, match=r"q_b_proj.weight: this plan cuts inside a quantisation block"):
        convert(source, tmp_path / "out", tp=8, ep=8, layout="deepseek-mp")


def test_verify_and_run_names_the_layout(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    convert(tiny("deepseek_v3_wide"), tmp_path / "out", tp=1, ep=1, layout="deepseek-mp")
    with pytest.raises(RuntimeFault, match="has the layout deepseek-mp, only reshard is read"):
        open_output(tmp_path / "out")
