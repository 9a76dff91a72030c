"""The checkpoint of `reshard demo`: DeepSeek-V3 in small, FP8 in blocks of 128x128, with random values.

It has what makes the large one hard to cut: latent attention with a low-rank query, YaRN, a dense first layer,
group-limited sigmoid routing with an fp32 bias, a shared expert, matrices that end inside a block, and a
multi-token-prediction layer stored behind the last one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

BLOCK = 128
"""Rows and columns of values that share a scale."""
FILE_BYTES = 16_000_000
"""A file is closed before it grows beyond this."""
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "kv_lora_rank": 128,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 320,  # two and a half blocks
    "n_group": 4,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 8,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
    },
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 4,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 1024,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 64,
    "vocab_size": 4000,
}

Named = Iterator[tuple[str, Tensor]]


def make_demo_checkpoint(folder: Path, seed: int = 0) -> None:
    """Write config.json, generation_config.json, the weights in several files and their index into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    ends = {key: CONFIG[key] for key in ("bos_token_id", "eos_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")
    files: list[dict[str, Tensor]] = [{}]
    size = total = 0
    for name, tensor in _tensors(torch.Generator().manual_seed(seed)):
        if files[-1] and size + tensor.nbytes > FILE_BYTES:
            files.append({})
            size = 0
        files[-1][name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
    weight_map: dict[str, str] = {}
    for number, file in enumerate(files, 1):
        path = folder / f"model-{number:05}-of-{len(files):06}.safetensors"
        save_file(file, path, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(file, path.name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _tensors(generator: torch.Generator) -> Named:
    """Every stored tensor, in the order of a published checkpoint."""
    hidden, vocabulary, layers = CONFIG["hidden_size"], CONFIG["vocab_size"], CONFIG["num_hidden_layers"]

    def outside(name: str, gain: float) -> Named:
        yield name, (gain * torch.randn(vocabulary, hidden, generator=generator)).bfloat16()

    yield from outside("model.embed_tokens.weight", 1)
    for layer in range(layers + 1):
        yield from _layer(f"model.layers.{layer}", layer, generator)
    prefix = f"model.layers.{layers}"  # multi-token prediction
    for name in ("enorm", "hnorm", "shared_head.norm"):
        yield from _norm(f"{prefix}.{name}", hidden, generator)
    yield f"{prefix}.eh_proj.weight", _matrix(hidden, 2 * hidden, generator).bfloat16()
    yield from outside(f"{prefix}.embed_tokens.weight", 1)
    yield from outside(f"{prefix}.shared_head.head.weight", hidden**-0.5)
    yield from _norm("model.norm", hidden, generator)
    yield from outside("lm_head.weight", hidden**-0.5)


def _layer(prefix: str, layer: int, generator: torch.Generator) -> Named:
    """One layer: latent attention, then a dense feed-forward or experts."""
    hidden, heads = CONFIG["hidden_size"], CONFIG["num_attention_heads"]
    q_lora, kv_lora, value = CONFIG["q_lora_rank"], CONFIG["kv_lora_rank"], CONFIG["v_head_dim"]
    nope, rope = CONFIG["qk_nope_head_dim"], CONFIG["qk_rope_head_dim"]
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    yield from _norm(f"{prefix}.input_layernorm", hidden, generator)
    yield from _fp8(f"{attention}.q_a_proj", q_lora, hidden, generator)
    yield from _norm(f"{attention}.q_a_layernorm", q_lora, generator)
    yield from _fp8(f"{attention}.q_b_proj", heads * (nope + rope), q_lora, generator)
    yield from _fp8(f"{attention}.kv_a_proj_with_mqa", kv_lora + rope, hidden, generator)
    yield from _norm(f"{attention}.kv_a_layernorm", kv_lora, generator)
    yield from _fp8(f"{attention}.kv_b_proj", heads * (nope + value), kv_lora, generator)
    yield from _fp8(f"{attention}.o_proj", hidden, heads * value, generator)
    yield from _norm(f"{prefix}.post_attention_layernorm", hidden, generator)
    if layer < CONFIG["first_k_dense_replace"]:
        yield from _swiglu(mlp, CONFIG["intermediate_size"], generator)
        return
    experts, inner = CONFIG["n_routed_experts"], CONFIG["moe_intermediate_size"]
    yield f"{mlp}.gate.weight", (2 * _matrix(experts, hidden, generator)).bfloat16()
    # A large common offset with small differences, as trained ones have: half precision would lose them.
    yield f"{mlp}.gate.e_score_correction_bias", 5 + 0.15 * torch.randn(experts, generator=generator)
    for expert in range(experts):
        yield from _swiglu(f"{mlp}.experts.{expert}", inner, generator)
    yield from _swiglu(f"{mlp}.shared_experts", inner * CONFIG["n_shared_experts"], generator)


def _swiglu(prefix: str, inner: int, generator: torch.Generator) -> Named:
    """The three weights of a feed-forward of width `inner`."""
    hidden = CONFIG["hidden_size"]
    yield from _fp8(f"{prefix}.gate_proj", inner, hidden, generator)
    yield from _fp8(f"{prefix}.up_proj", inner, hidden, generator)
    yield from _fp8(f"{prefix}.down_proj", hidden, inner, generator)


def _norm(prefix: str, size: int, generator: torch.Generator) -> Named:
    """A norm's weight, around 1."""
    yield f"{prefix}.weight", (1 + 0.2 * torch.randn(size, generator=generator)).bfloat16()


def _matrix(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Random values [rows, columns] that keep unit variance."""
    return torch.randn(rows, columns, generator=generator) / math.sqrt(columns)


def _fp8(prefix: str, rows: int, columns: int, generator: torch.Generator) -> Named:
    """A weight as F8_E4M3 [rows, columns] and its F32 scales [ceil(rows/128), ceil(columns/128)]; w = value x scale."""
    tall, wide = math.ceil(rows / BLOCK), math.ceil(columns / BLOCK)
    weight = torch.zeros(tall * BLOCK, wide * BLOCK)
    weight[:rows, :columns] = _matrix(rows, columns, generator)
    scales = weight.view(tall, BLOCK, wide, BLOCK).abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
    grid = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    yield f"{prefix}.weight", (weight / grid)[:rows, :columns].to(torch.float8_e4m3fn).contiguous()
    yield f"{prefix}.weight_scale_inv", scales
