"""Folders for vLLM spoiled as a bug would spoil them, digests and all: `check --deep` finds every one.

vLLM's loader itself refuses lost and unknown keys (test_vllm.py), and takes swapped ranks in silence.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from converter.check import check
from converter.verbs import convert
from shard_plans.documents.manifest import read_manifest, read_shard_manifest
from shard_plans.families import dims
from shard_plans.families.dims import Share, Taken
from shard_plans.layouts import vllm
from shard_plans.layouts.keys import key_map
from shard_plans.layouts.registry import find_layout
from tests.conftest import MakeCheckpoint
from tests.tools import tamper


def test_exchanged_ranks_are_found(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    source, out = tiny("llama"), tmp_path / "out"
    convert(source, out, layout="vllm@0.33", tp=2)
    first, second = (out / f"model-rank-{rank}-part-0.safetensors" for rank in (0, 1))
    whole = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(whole)
    assert not check(out, source).passed


def test_gate_and_up_exchanged_are_found(tiny: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layout that lays up before gate writes a folder that the deep check refuses."""
    source, out = tiny("llama"), tmp_path / "out"
    layout = find_layout("vllm@0.33")
    with monkeypatch.context() as patch:
        right = key_map("vllm", "0.33", "llama")
        swapped = [replace(k, roles=("mlp.up", "mlp.gate")) if "gate_up" in k.name else k for k in right.keys]
        wrong = replace(right, keys=tuple(swapped))
        patch.setattr(vllm, "key_map", lambda *_: wrong)
        convert(source, out, layout=layout.name)
    assert not check(out, source).passed


def test_a_kv_head_too_far_is_found(tiny: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two KV heads over four ranks: the engine wants 0, 0, 1, 1; this layout writes 0, 1, 0, 1."""
    source, out = tiny("llama"), tmp_path / "out"
    take_size = dims.take_size

    def off(name: str, size: int, rule: str, axis: str, share: Share) -> Taken:
        if rule == "repeat" and share.count > size:
            return Taken(((share.index % size, share.index % size + 1),), 1)
        return take_size(name, size, rule, axis, share)

    with monkeypatch.context() as patch:
        patch.setattr(dims, "take_size", off)
        convert(source, out, layout="vllm@0.33", tp=4)
    assert check(out).passed
    found = {failure.tensor for failure in check(out, source).failures}
    assert "model.layers.0.self_attn.qkv_proj.weight" in found


@pytest.mark.parametrize("spoil", ["stale alias", "lost scale"])
def test_another_set_of_keys_is_found(spoil: str, tiny: MakeCheckpoint, tmp_path: Path) -> None:
    source, out = tiny("qwen3_moe"), tmp_path / "out"
    convert(source, out, layout="vllm@0.33")
    name = (
        "model.layers.0.mlp.experts.gate.weight" if spoil == "stale alias" else "model.layers.0.self_attn.attn._k_scale"
    )
    with tamper.opened(out, read_manifest(out).files[0].name) as shard:
        entry = shard.entry(name)
        if spoil == "stale alias":
            alias = "model.layers.0.mlp.gate.weight"
            shard.manifest["tensors"].append({**entry, "name": alias})
            shard.data[alias] = shard.data[name]
        else:
            shard.manifest["tensors"].remove(entry)
            del shard.data[name]
    assert check(out).passed
    reasons = [failure.reason for failure in check(out, source).failures]
    assert any(words in reason for reason in reasons for words in ("the plan doesn't place it", "is lost: the plan"))


@pytest.mark.parametrize("spoil", ["value", "missing", "statement"])
def test_a_wrong_constant_is_found(spoil: str, tiny: MakeCheckpoint, tmp_path: Path) -> None:
    """In the data, or in what the manifest says of it."""
    source, out = tiny("llama"), tmp_path / "out"
    convert(source, out, layout="vllm@0.33")
    root = read_manifest(out)
    manifest = read_shard_manifest(out, root.files[0].name, root)
    scale = next(tensor for tensor in manifest.tensors if tensor.name.endswith("_k_scale"))
    with tamper.opened(out, manifest.file) as shard:
        if spoil == "value":
            shard.data[scale.name] = bytes(4)
        elif spoil == "missing":
            del shard.entry(scale.name)["fill"]
        else:
            shard.entry(scale.name)["fill"] = 2.0
    assert check(out).passed  # all digests are right; only the meaning is wrong
    assert any(failure.tensor == scale.name for failure in check(out, source).failures)
