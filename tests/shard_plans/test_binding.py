"""Binding: every stored tensor to one row, and a fault that names the tensor for everything else."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from shard_plans.checkpoints.checkpoint import open_checkpoint
from shard_plans.errors import CheckpointError, ConfigError, FamilyError, ReshardError
from shard_plans.families.binding import Binding, bind
from shard_plans.families.family import load_family
from shard_plans.families.model import lookup
from tests.checkpoints.variants import VARIANTS
from tests.conftest import MakeCheckpoint

MOE = "model.layers.0.block_sparse_moe"
Tensors = dict[str, Any]


def bound(folder: Path, table: Path | None = None) -> Binding:
    checkpoint = open_checkpoint(folder)
    return bind(checkpoint, load_family(checkpoint.config, table))


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_every_tensor_belongs_to_one_parameter(tiny: MakeCheckpoint, name: str) -> None:
    binding = bound(tiny(name))
    numbers = np.concatenate([part.tensors for p in binding.parameters for part in p.parts])
    assert sorted(numbers.tolist()) == list(range(len(binding.checkpoint)))
    assert sum(part.nbytes for p in binding.parameters for part in p.parts) == binding.checkpoint.total_bytes


def rewrite(
    folder: Path, change: Callable[[Tensors], None], config: Callable[[dict[str, Any]], None] | None = None
) -> Path:
    """The checkpoint as one file, its float32 tensors and config changed."""
    tensors: Tensors = {}
    for file in sorted(folder.glob("model*.safetensors")):
        tensors |= load_file(file)
        file.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    if config is not None:
        data = json.loads((folder / "config.json").read_text())
        config(data)
        (folder / "config.json").write_text(json.dumps(data))
    return folder


def small(folder: Path) -> Path:
    """A mixtral of one layer and two experts, in float32, which numpy can write."""
    folder.mkdir()
    shapes = {
        "model.embed_tokens": (8, 4), "model.norm": (4,), "lm_head": (8, 4), "model.layers.0.input_layernorm": (4,),
        "model.layers.0.post_attention_layernorm": (4,), "model.layers.0.block_sparse_moe.gate": (2, 4),
        **{f"model.layers.0.self_attn.{n}_proj": (4, 4) for n in "qkvo"},
        **{f"{MOE}.experts.{e}.{w}": (4, 6) if w == "w2" else (6, 4) for e in (0, 1) for w in ("w1", "w2", "w3")},
    }  # fmt: skip
    save_file({f"{k}.weight": np.ones(s, np.float32) for k, s in shapes.items()}, folder / "model.safetensors")
    config = {
        "model_type": "mixtral", "hidden_act": "silu", "hidden_size": 4, "vocab_size": 8, "num_attention_heads": 2,
        "num_key_value_heads": 2, "intermediate_size": 6, "num_hidden_layers": 1, "num_local_experts": 2,
        "num_experts_per_tok": 1, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda t: t.pop(f"{MOE}.experts.1.w3.weight"), r"experts.1.w3.weight is missing: 1 of 2 experts"),
        (lambda t: t.pop("lm_head.weight"), "lm_head.weight is missing, .* say that it is tied"),
        (lambda t: t.update({"model.layers.0.extra.weight": np.ones(3, np.float32)}), "extra.weight matches no row"),
        (
            lambda t: t.update({f"{MOE}.experts.2.w1.weight": np.ones((6, 4), np.float32)}),
            "experts.2.w1.weight matches no row",
        ),
        (
            lambda t: t.update({"model.layers.1.input_layernorm.weight": np.ones(4, np.float32)}),
            "layers.1.input_layernorm.*no row",
        ),
        (
            lambda t: t.update({"model.layers.00.input_layernorm.weight": np.ones(4, np.float32)}),
            "layers.00.input.*no row",
        ),
        (
            lambda t: t.update({"model.norm.weight": np.ones(5, np.float32)}),
            r"norm.weight has shape \[5\], config.json makes it \[4\]",
        ),
        (
            lambda t: t.update({"model.norm.weight": np.ones(4, np.int32)}),
            "norm.weight is stored as I32, allowed: BF16",
        ),
        (
            lambda t: t.update({f"{MOE}.experts.1.w1.weight": np.ones((6, 4), np.float16)}),
            "experts of one layer must share a type",
        ),
        (
            lambda t: t.update({f"{MOE}.experts.0.w1.weight_scale_inv": np.ones((1, 1), np.float32)}),
            "scale_inv matches no row",
        ),
    ],
)
def test_the_first_difference_is_named(tmp_path: Path, change: Callable[[Tensors], None], words: str) -> None:
    folder = small(tmp_path / "c")
    bound(folder)
    with pytest.raises(ReshardError, match=words):
        bound(rewrite(folder, change))


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (
            lambda c: c.update(model_type="mamba2"),
            FamilyError,
            "'mamba2' is an unknown architecture; known: deepseek_v2, deepseek_v3",
        ),
        (lambda c: c.pop("num_local_experts"), ConfigError, "lacks 'num_local_experts'"),
        (
            lambda c: c.update(hidden_act="gelu"),
            ConfigError,
            "hidden_act is 'gelu', the family table mixtral covers 'silu'",
        ),
        (lambda c: c.update(num_hidden_layers=-1), ConfigError, "number of layers is -1"),
        (lambda c: c.update(num_hidden_layers=10**9), ConfigError, "1000000000 layers"),
        (lambda c: c.update(hidden_size="4"), ConfigError, "size hidden is '4'"),
        (lambda c: c.update(quantization_config={"quant_method": "awq"}), ConfigError, "'awq' is an unknown format"),
        (lambda c: c.update(quantization_config={"quant_method": "fp8"}), ConfigError, "without its block size"),
    ],
)
def test_configs(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], kind: type[ReshardError], words: str
) -> None:
    with pytest.raises(kind, match=words):
        bound(rewrite(small(tmp_path / "c"), lambda _: None, change))


def test_tied_embeddings_by_what_is_stored(tmp_path: Path) -> None:
    untie = small(tmp_path / "a")
    assert not bound(untie).model.tied
    tied = rewrite(
        small(tmp_path / "b"), lambda t: t.pop("lm_head.weight"), lambda c: c.update(tie_word_embeddings=True)
    )
    assert bound(tied).model.tied and bound(tied).doubled is None
    doubled = bound(rewrite(small(tmp_path / "d"), lambda _: None, lambda c: c.update(tie_word_embeddings=True)))
    assert doubled.doubled is not None and not doubled.model.tied


def test_mtp_layers_all_or_none(tiny: MakeCheckpoint, own_tiny: MakeCheckpoint) -> None:
    binding = bound(tiny("deepseek_v3_mtp"))
    assert [layer.mtp for layer in binding.model.layers] == [False, False, False, True]
    assert {p.stage for p in binding.parameters if p.layer == 3} == {"mtp"}
    folder = own_tiny("deepseek_v3")  # announced, but nothing of it stored
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    unstored = bound(folder)
    assert len(unstored.model.layers) == 3 and "none is stored" in unstored.notes[0]


def test_fp8_without_its_scale_is_refused(own_tiny: MakeCheckpoint) -> None:
    folder = own_tiny("qwen3_moe_fp8")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    name = "model.layers.1.self_attn.q_proj.weight_scale_inv"
    from safetensors.torch import load_file as load
    from safetensors.torch import save_file as save

    path = folder / index["weight_map"].pop(name)
    tensors = load(path)
    del tensors[name]
    save(tensors, path)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ReshardError, match=r"q_proj.weight_scale_inv is missing: .* means nothing without its scale"):
        bound(folder)


def test_names_with_the_mark_of_a_number_are_not_numbers(tmp_path: Path) -> None:
    stray = {"model.layers.#.input_layernorm.weight": np.ones(4, np.float32)}
    with pytest.raises(CheckpointError, match=r"layers.#.input_layernorm.weight matches no row"):
        bound(rewrite(small(tmp_path / "c"), lambda tensors: tensors.update(stray)))


@pytest.mark.parametrize("value", [[], {}, None, 7])
def test_a_model_type_that_is_no_word(tmp_path: Path, value: Any) -> None:
    with pytest.raises(FamilyError, match="unknown architecture"):
        bound(rewrite(small(tmp_path / "c"), lambda _: None, lambda config: config.update(model_type=value)))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("x.weight: moe.router [experts] quant", "two dimensions or more can be quantised"),
        ("x.weight: layers.x [hidden]", "can't begin with `layers`"),
        (f"x.weight: moe.router [{', '.join(['1'] * 70)}]", "70 dimensions; at most 8"),
        ("x.weight: moe.router [tp(heads), tp(hidden)]", "two dimensions are cut along tp"),
    ],
)
def test_rows_that_no_checkpoint_can_have(tmp_path: Path, row: str, words: str) -> None:
    table = tmp_path / "own.yaml"
    table.write_text(f"family: own\nmatch: [mixtral]\nextends: mixtral\ntensors:\n  layer:\n    {row}\n")
    with pytest.raises(FamilyError, match=re.escape(words)):
        bound(small(tmp_path / "c"), table)


def test_a_table_without_an_embedding_is_refused(tmp_path: Path) -> None:
    table = tmp_path / "own.yaml"
    table.write_text(
        "family: own\nmatch: [mixtral]\nextends: mixtral\ntensors:\n  first:\n    model.embed_tokens.weight: ~\n"
    )
    with pytest.raises(FamilyError, match="one row each of the roles embed, norm and head"):
        bound(small(tmp_path / "c"), table)


def test_a_lost_head_is_not_taken_for_a_tied_one(tmp_path: Path) -> None:
    """None of these families ties its head by default, so a config that says nothing says that it is stored."""
    folder = rewrite(
        small(tmp_path / "c"), lambda t: t.pop("lm_head.weight"), lambda config: config.pop("tie_word_embeddings")
    )
    with pytest.raises(CheckpointError, match=r"lm_head.weight is missing, .* say that it is tied"):
        bound(folder)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mixtral", "qwen3_moe", "deepseek_v3"])
def test_a_config_without_rope_theta_means_what_transformers_means(name: str) -> None:
    from transformers import AutoConfig

    wanted = AutoConfig.for_model(name).rope_parameters["rope_theta"]
    assert lookup(load_family({"model_type": name}), {})["rope_theta"] == wanted
