"""vLLM's folders: keys, shapes and types are those that the engine's model classes had when they were built."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from converter.check import check
from converter.restore import restore
from converter.verbs import convert
from shard_plans.documents.manifest import read_manifest
from shard_plans.documents.plan import read_plan
from shard_plans.errors import GridError, PlanError
from shard_plans.families.config_binding import bind_config
from shard_plans.families.family import load_family
from shard_plans.layouts.registry import find_layout
from shard_plans.placement.shards import ShardTensor
from tests.checkpoints.store import read_tensors
from tests.conftest import MakeCheckpoint
from tests.engines.checkpoints import as_published
from tests.tools.converted import contents
from tests.tools.plans import make_plan, plan_id

DUMPS = sorted(Path(__file__).with_name("vllm_keys").rglob("*.json"))
"""state_dict() of the engine's classes, after the filter of its loader: shapes and types of each rank."""
TYPES = {"BF16": "bfloat16", "F32": "float32", "F8_E4M3": "float8_e4m3fn"}
LEFT_OUT = {
    "rms_norm_eps": 1e-6, "dtype": "bfloat16", "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 1.0, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "partial_rotary_factor": 0.5, "linear_num_value_heads": 4, "interleave_moe_layer_step": 1, "use_bias": False,
    "attention_chunk_size": 8, "rope_parameters": {"partial_rotary_factor": 0.25},
}  # fmt: skip
"""Keys of a config.json that the dumps didn't keep, because no parameter's name or shape depends on them."""
SAID: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"topk_method": "noaux_tc"},
    "deepseek_v2": {"norm_topk_prob": False},
    "ernie4_5_moe": {
        "moe_num_experts": 16, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1,
        "moe_layer_end_index": 2, "moe_layer_interval": 1, "moe_norm_min": 1e-12,
    },
}  # fmt: skip
"""The same of one family; the shapes that they decide are in the dump."""


def said(dump: dict[str, Any]) -> dict[str, Any]:
    """Keys that its config.json needs too."""
    section = dump["config"].get("quantization_config")
    routers = [f"model.layers.{layer}.mlp.gate" for layer in range(dump["config"]["num_hidden_layers"])]
    named = {"quantization_config": {**section, "modules_to_not_convert": routers}} if section else {}
    return SAID.get(dump["config"]["model_type"], {}) | named


def planned(dump: dict[str, Any], **changes: Any) -> list[ShardTensor]:
    """The tensors of the dump's rank, planned from its config alone."""
    config = LEFT_OUT | dump["config"] | changes
    if "num_local_experts" in config:
        config["num_experts"] = config["num_local_experts"]
    binding = bind_config(config, "0" * 32, Path("config.json"), load_family(config))
    layout = find_layout(f"vllm@{dump['engine'].split()[1].rpartition('.')[0]}")
    tp, pp, ep = dump["tp"], dump["pp"], dump["tp"] if dump["ep"] else 1
    sizes = {"tp": tp, "pp": pp} | ({"ep": ep, "etp": tp // ep} if "experts" in binding.model.sizes else {})
    placement = layout.place(binding, layout.chosen(binding, make_plan(binding, sizes)))
    (name,) = placement.ranks[dump["rank"]][1]
    return list(next(file for file in placement.files if file.name == name).tensors)


@pytest.mark.parametrize("path", DUMPS, ids=lambda path: f"{path.parent.name} {path.stem}")
def test_keys_shapes_and_types_are_the_engine_s(path: Path) -> None:
    dump = json.loads(path.read_text())
    bias = any(key.endswith("correction_bias") for key in dump["kept"])
    tensors = planned(dump, **said(dump))
    mine = {t.name: (list(t.shape), TYPES[t.dtype]) for t in tensors}
    if (
        dump["config"]["model_type"] == "deepseek_v3" and not bias
    ):  # these classes were built without; then the router's bias is all that differs
        mine = {key: value for key, value in mine.items() if not key.endswith("e_score_correction_bias")}
    kept = {key: (value["shape"], value["dtype"]) for key, value in dump["kept"].items()}
    if path.stem.startswith("qwen3_moe_fp8"):  # built with quantised routers, which no published checkpoint has
        mine, kept = ({key: v for key, v in some.items() if ".mlp.experts.gate." not in key} for some in (mine, kept))
    if path.parent.name != "vllm_keys":  # of older releases; these dumps leave out the first layer
        mine = {key: value for key, value in mine.items() if ".layers.0." not in key}
    assert mine == kept


def test_kimi_k25_is_deepseek_v3_a_level_down() -> None:
    """Its class holds that of deepseek_v3 as `language_model`; the engine's dump of the latter has the keys."""
    dump = json.loads(next(path for path in DUMPS if "noaux" in path.stem).read_text())
    config = LEFT_OUT | dump["config"] | said(dump)
    within = dump | {"config": {"model_type": "kimi_k25", "text_config": config}}
    found = {tensor.name: (list(tensor.shape), TYPES[tensor.dtype]) for tensor in planned(within)}
    assert found == {f"language_model.{key}": (kept["shape"], kept["dtype"]) for key, kept in dump["kept"].items()}


def test_a_stale_alias_or_another_order_would_show() -> None:
    """The comparison above can fail: other keys than the engine keeps are the aliases that it drops."""
    dump = json.loads(next(path for path in DUMPS if "noaux" in path.stem).read_text())
    names = {tensor.name for tensor in planned(dump)}
    assert names.isdisjoint(dump["dropped_aliases"])
    assert len(dump["dropped_aliases"]) > 20


NAMES = (
    "llama", "qwen2", "qwen2_untied", "qwen3", "mixtral", "qwen3_moe", "qwen3_moe_fp8", "deepseek_v2", "deepseek_v3",
    "qwen3_moe_tied", "glm4_moe", "qwen3_next_wide", "llama4_even", "ernie4_5_moe", "minimax_m2", "gpt_oss_wide",
)  # fmt: skip
SIZES: tuple[dict[str, int], ...] = ({}, {"tp": 2}, {"tp": 4}, {"tp": 2, "pp": 2}, {"tp": 2, "ep": 2})
QUICK = ({"tp": 2, "pp": 2}, {"tp": 2, "ep": 2})


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        pytest.param(name, sizes, id=f"{name} {plan_id(sizes)}", marks=[] if sizes in QUICK else pytest.mark.slow)
        for name in NAMES
        for sizes in SIZES
    ],
)
def test_every_byte_goes_out_and_comes_back(
    name: str, sizes: dict[str, int], own_tiny: MakeCheckpoint, tmp_path: Path
) -> None:
    source, out = as_published(own_tiny(name)), tmp_path / "out"
    dense = name.startswith(("llama", "qwen2", "qwen3")) and "moe" not in name
    if dense and "ep" in sizes:
        return
    fp8_cut = name == "qwen3_moe_fp8" and sizes.get("tp", 1) > 1 and sizes.get("tp") != 2
    if fp8_cut:
        with pytest.raises(PlanError, match="block"):
            convert(source, out, layout="vllm@0.33", **sizes)  # type: ignore[arg-type]
        return
    convert(source, out, layout="vllm@0.33", **sizes)  # type: ignore[arg-type]
    result = check(out, source)
    assert result.passed, result.failures
    restore(out, tmp_path / "back")
    for file, data in contents(tmp_path / "back").items():
        assert data == (source / file).read_bytes(), file
    assert (out / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert not (out / "model.safetensors.index.json").exists()


def test_of_kimi_k25_the_text_alone_is_written(own_tiny: MakeCheckpoint, tmp_path: Path) -> None:
    """What lies under `language_model.` goes out and comes back; the tower is listed as left out."""
    source, out, back = as_published(own_tiny("kimi_k25")), tmp_path / "out", tmp_path / "back"
    convert(source, out, layout="vllm@0.33", tp=2, ep=2)
    assert all(name.startswith("language_model.") for held in loaded(out) for name in held)
    result = check(out, source)
    assert result.passed, result.failures
    restore(out, back)
    stored, restored = read_tensors(source), read_tensors(back)
    skipped = {skip.pattern for skip in read_manifest(out).skipped}
    assert stored.keys() - restored.keys() == skipped
    assert {name.partition(".")[0] for name in skipped} == {"vision_tower", "mm_projector"}
    assert all(torch.equal(tensor, stored[name]) for name, tensor in restored.items())


def loaded(out: Path) -> list[dict[str, Tensor]]:
    """Each rank's tensors."""
    found = []
    for path in sorted(out.glob("model-*-part-0.safetensors")):
        with safe_open(path, "pt") as file:
            found.append({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 (not a mapping)
    return found


def test_values_are_an_independent_slicing_of_the_source(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    """qkv, gate and up, experts, vocabulary and scales of two ranks, sliced here by the engine's published rules."""
    source, out = tiny("qwen3_moe"), tmp_path / "out"
    convert(source, out, layout="vllm@0.33", tp=2, ep=2)
    stored = read_tensors(source)
    for rank, held in enumerate(loaded(out)):
        layer = "model.layers.1."
        parts = [stored[f"{layer}self_attn.{part}_proj.weight"].chunk(2)[rank] for part in "qkv"]
        assert torch.equal(held[f"{layer}self_attn.qkv_proj.weight"], torch.cat(parts))
        wanted = [
            torch.cat([stored[f"{layer}mlp.experts.{expert}.{part}_proj.weight"] for part in ("gate", "up")])
            for expert in range(rank * 8, rank * 8 + 8)
        ]
        assert torch.equal(held[f"{layer}mlp.experts.routed_experts.w13_weight"], torch.stack(wanted))
        assert torch.equal(held["lm_head.weight"], stored["lm_head.weight"].chunk(2)[rank])
        for name in ("_k_scale", "_v_scale", "_q_scale", "_prob_scale"):
            assert held[f"{layer}self_attn.attn.{name}"].item() == 1.0
            assert held[f"{layer}self_attn.attn.{name}"].shape == ()


def test_the_vocabulary_is_padded_to_whole_64_rows(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    convert(tiny("llama_odd"), tmp_path / "out", layout="vllm@0.33")
    (held,) = loaded(tmp_path / "out")
    assert held["model.embed_tokens.weight"].shape[0] == 256
    assert not held["model.embed_tokens.weight"][250:].any()
    with pytest.raises(GridError, match="tp 3 doesn't divide the vocabulary, which the engine pads to 256 rows"):
        convert(tiny("llama_odd"), tmp_path / "other", layout="vllm@0.33", tp=3)


def test_placeholders_of_fp8(own_tiny: MakeCheckpoint, tmp_path: Path) -> None:
    convert(as_published(own_tiny("qwen3_moe_fp8")), tmp_path / "out", layout="vllm@0.33")
    (held,) = loaded(tmp_path / "out")
    scale = held["model.layers.0.self_attn.attn.k_scale"]
    assert (scale.item(), scale.dtype, scale.shape) == (-1.0, torch.bfloat16, ())


def test_an_older_release(tiny: MakeCheckpoint, own_tiny: MakeCheckpoint, tmp_path: Path) -> None:
    """Its own keys; the plan and the manifest name it; no stages, no refined blocks, and not every family."""
    source, out = tiny("qwen3_moe"), tmp_path / "out"
    convert(source, out, layout="vllm@0.23", tp=2)
    assert read_manifest(out).layout == read_plan(out / "plan.yaml").layout == "vllm@0.23"
    assert "model.layers.1.mlp.experts.w13_weight" in loaded(out)[0]
    assert check(out, source).passed
    for name, sizes, words in (
        ("qwen3_moe", {"pp": 2}, "gives the files of all stages one name; give pp 1"),
        ("qwen3_moe_fp8", {"tp": 4}, "cuts inside a quantisation block"),
        ("deepseek_v3", {}, "builds its class on an accelerator alone"),
    ):
        with pytest.raises(PlanError, match=words):
            convert(as_published(own_tiny(name)), tmp_path / "other", layout="vllm@0.23", **sizes)  # type: ignore[arg-type]
        shutil.rmtree(tmp_path / name)
