"""Memory: bounded whatever the size of a tensor."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints.giant import write_sparse

BOUND = 500 << 20
HIDDEN, VOCAB = 4096, 262_144
CONFIG = {
    "model_type": "llama", "hidden_size": HIDDEN, "vocab_size": VOCAB, "num_hidden_layers": 1, "hidden_act": "silu",
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 8192, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "max_position_embeddings": 4096, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip
RUN = (
    "import resource, subprocess, sys; code = subprocess.run(sys.argv[1:]).returncode; "
    "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024); sys.exit(code)"
)


def bounded(*words: str) -> None:
    """Run the command; it must do its work within the memory."""
    command = [sys.executable, "-c", RUN, sys.executable, "-m", "reshard", *words, "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout.split()[-1]) < BOUND


@pytest.mark.slow
def test_experts_that_are_turned(tmp_path: Path) -> None:
    """Matrices of 168 and 84 MB, output first in the engine's folder: in bands, there and back."""
    hidden, width, layer = 5120, 8192, "model.layers.0"
    config = CONFIG | {
        "model_type": "llama4_text", "hidden_size": hidden, "vocab_size": 1024, "num_local_experts": 2, "head_dim": 128,
        "num_experts_per_tok": 1, "intermediate_size": width, "intermediate_size_mlp": width, "num_attention_heads": 40,
        "interleave_moe_layer_step": 1, "attention_chunk_size": 8192, "tie_word_embeddings": False,
    }  # fmt: skip
    shapes = {
        "model.embed_tokens.weight": [1024, hidden], "model.norm.weight": [hidden], "lm_head.weight": [1024, hidden],
        f"{layer}.input_layernorm.weight": [hidden], f"{layer}.post_attention_layernorm.weight": [hidden],
        f"{layer}.self_attn.q_proj.weight": [hidden, hidden], f"{layer}.self_attn.k_proj.weight": [1024, hidden],
        f"{layer}.self_attn.v_proj.weight": [1024, hidden], f"{layer}.self_attn.o_proj.weight": [hidden, hidden],
        f"{layer}.feed_forward.router.weight": [2, hidden],
        f"{layer}.feed_forward.experts.gate_up_proj": [2, hidden, 2 * width],
        f"{layer}.feed_forward.experts.down_proj": [2, width, hidden],
        **{f"{layer}.feed_forward.shared_expert.{part}_proj.weight": [width, hidden] for part in ("gate", "up")},
        f"{layer}.feed_forward.shared_expert.down_proj.weight": [hidden, width],
    }  # fmt: skip
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    write_sparse(source / "model.safetensors", [(name, "BF16", shape) for name, shape in shapes.items()])
    layout = ("--tp", "2", "--layout", "vllm@0.33")
    for words in (
        ("convert", source, out, *layout), ("check", out, "--deep", source), ("restore", out, tmp_path / "back"),
        ("convert", out, tmp_path / "native", "--tp", "2"),
    ):  # fmt: skip
        bounded(*map(str, words))


@pytest.mark.slow
def test_an_embedding_of_two_gigabytes(tmp_path: Path) -> None:
    layer, wide = "model.layers.0", 8192
    shapes = {
        "model.embed_tokens.weight": [VOCAB, HIDDEN], "model.norm.weight": [HIDDEN],
        f"{layer}.input_layernorm.weight": [HIDDEN], f"{layer}.post_attention_layernorm.weight": [HIDDEN],
        f"{layer}.self_attn.q_proj.weight": [HIDDEN, HIDDEN], f"{layer}.self_attn.k_proj.weight": [1024, HIDDEN],
        f"{layer}.self_attn.v_proj.weight": [1024, HIDDEN], f"{layer}.self_attn.o_proj.weight": [HIDDEN, HIDDEN],
        f"{layer}.mlp.gate_proj.weight": [wide, HIDDEN], f"{layer}.mlp.up_proj.weight": [wide, HIDDEN],
        f"{layer}.mlp.down_proj.weight": [HIDDEN, wide],
    }  # fmt: skip
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(CONFIG))
    write_sparse(source / "model.safetensors", [(name, "BF16", shape) for name, shape in shapes.items()])
    for words in (
        ("convert", source, out, "--tp", "2", "--ranks", "1", "--workers", "16", "--buffer", "64"),
        ("check", out, "--deep", source),
        (
            "convert",
            source,
            tmp_path / "other",
            "--tp",
            "2",
            "--workers",
            "8",
            "--weights",
            "nvfp4,embeddings=fp8_channel",
        ),
        ("check", tmp_path / "other", "--deep", source),
    ):
        bounded(*map(str, words))
