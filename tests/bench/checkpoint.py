"""Checkpoints to measure with: one in the shape of DeepSeek-V3, of seeded random numbers, and two layers of Kimi K3."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.checkpoints.giant import make_giant

HIDDEN, EXPERTS, EXPERT_FFN, HEADS, VOCAB, BLOCK = 2048, 64, 1024, 16, 32768, 128
Q_LORA, KV_LORA, NOPE, ROPE, V_DIM, FFN = 768, 512, 128, 64, 128, 6144
PUBLISHED = 7168
"""The hidden size of DeepSeek-V3, which its inference code goes by."""
PART = 1 << 30
"""Bytes of a file of the checkpoint."""
STEP = 8 << 20
SCALE = 1 / (0.6 * math.sqrt(HIDDEN))
"""0.6 is the root mean square of the FP8 numbers that are drawn."""
LARGE = 1 << 20
"""Bytes of a tensor that may hold anything; among smaller ones are some that a table says are zero."""
Shapes = dict[str, tuple[str, tuple[int, ...]]]


def config(layers: int, hidden: int = HIDDEN) -> dict[str, object]:
    """config.json of a small DeepSeek-V3 in FP8."""
    return {
        "model_type": "deepseek_v3", "hidden_size": hidden, "vocab_size": VOCAB, "num_hidden_layers": layers,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "q_lora_rank": Q_LORA, "kv_lora_rank": KV_LORA,
        "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": V_DIM, "intermediate_size": FFN,
        "n_routed_experts": EXPERTS, "num_experts_per_tok": 8, "moe_intermediate_size": EXPERT_FFN,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 8, "topk_group": 4, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc", "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "hidden_act": "silu", "tie_word_embeddings": False, "max_position_embeddings": 4096, "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]},
    }  # fmt: skip


def tensors(layers: int, hidden: int = HIDDEN) -> Shapes:
    """Names, types and shapes, in order."""
    found: Shapes = {"model.embed_tokens.weight": ("BF16", (VOCAB, hidden))}

    def matrix(name: str, rows: int, columns: int) -> None:
        found[f"{name}.weight"] = ("F8_E4M3", (rows, columns))
        found[f"{name}.weight_scale_inv"] = ("F32", (math.ceil(rows / BLOCK), math.ceil(columns / BLOCK)))

    def mlp(prefix: str, width: int) -> None:
        matrix(f"{prefix}gate_proj", width, hidden)
        matrix(f"{prefix}up_proj", width, hidden)
        matrix(f"{prefix}down_proj", hidden, width)

    for layer in range(layers):
        start = f"model.layers.{layer}."
        for norm, size in (
            ("input_layernorm", hidden), ("post_attention_layernorm", hidden),
            ("self_attn.q_a_layernorm", Q_LORA), ("self_attn.kv_a_layernorm", KV_LORA),
        ):  # fmt: skip
            found[f"{start}{norm}.weight"] = ("BF16", (size,))
        attention = f"{start}self_attn."
        matrix(f"{attention}q_a_proj", Q_LORA, hidden)
        matrix(f"{attention}q_b_proj", HEADS * (NOPE + ROPE), Q_LORA)
        matrix(f"{attention}kv_a_proj_with_mqa", KV_LORA + ROPE, hidden)
        matrix(f"{attention}kv_b_proj", HEADS * (NOPE + V_DIM), KV_LORA)
        matrix(f"{attention}o_proj", hidden, HEADS * V_DIM)
        if layer == 0:
            mlp(f"{start}mlp.", FFN)
            continue
        found[f"{start}mlp.gate.weight"] = ("BF16", (EXPERTS, hidden))
        found[f"{start}mlp.gate.e_score_correction_bias"] = ("F32", (EXPERTS,))
        for expert in range(EXPERTS):
            mlp(f"{start}mlp.experts.{expert}.", EXPERT_FFN)
        mlp(f"{start}mlp.shared_experts.", EXPERT_FFN)
    found["model.norm.weight"] = ("BF16", (hidden,))
    found["lm_head.weight"] = ("BF16", (VOCAB, hidden))
    return found


def size_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor."""
    return math.prod(shape) * {"BF16": 2, "F8_E4M3": 1, "F32": 4}[dtype]


def parts(found: Shapes) -> Iterator[Shapes]:
    """The tensors of each file."""
    part: Shapes = {}
    size = 0
    for name, (dtype, shape) in found.items():
        if part and size + size_of(dtype, shape) > PART:
            yield part
            part, size = {}, 0
        part[name] = dtype, shape
        size += size_of(dtype, shape)
    yield part


def content(random: np.random.Generator, name: str, dtype: str, count: int) -> bytes:
    """`count` numbers that a forward pass stays finite with: FP8 below 2, scales that make matrices keep a norm."""
    if dtype == "F8_E4M3":
        return bytes(np.frombuffer(random.bytes(count), np.uint8) & 0xBF)  # without the highest bit of the exponent
    if dtype == "F32":
        bias = name.endswith("e_score_correction_bias")
        return (random.random(count, np.float32) * 0.1 if bias else np.full(count, SCALE, np.float32)).tobytes()
    if "norm" in name:
        return np.full(count, 0x3F80, np.uint16).tobytes()
    exponent = 0x3F00 if "embed" in name else 0x3C80  # sign and fraction are random, in bf16: 1/2, or 1/64 and more
    return bytes((np.frombuffer(random.bytes(2 * count), np.uint16) & 0x807F) | exponent)


def make_deepseek(folder: Path, gigabytes: float, hidden: int = HIDDEN) -> None:
    """Write a checkpoint of about that size, of seeded random numbers."""
    one, two = (sum(size_of(*kind) for kind in tensors(layers, hidden).values()) for layers in (1, 2))
    layers = 1 + max(1, round((gigabytes * 1e9 - one) / (two - one)))
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config(layers, hidden), indent=1))
    weight_map: dict[str, str] = {}
    random = np.random.default_rng(0)
    listed = list(parts(tensors(layers, hidden)))
    for number, part in enumerate(listed, 1):
        name = f"model-{number:05}-of-{len(listed):05}.safetensors"
        weight_map |= dict.fromkeys(part, name)
        entries, end = {}, 0
        for tensor, (dtype, shape) in part.items():
            entries[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size_of(dtype, shape)]}
            end += size_of(dtype, shape)
        header = json.dumps(entries).encode()
        header += b" " * (-len(header) % 8)
        with open(folder / name, "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for tensor, (dtype, shape) in part.items():
                count = math.prod(shape)
                for start in range(0, count, STEP):
                    file.write(content(random, tensor, dtype, min(STEP, count - start)))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def make_kimi(folder: Path, layers: int = 2, filled: int = 2 << 30) -> None:
    """The first layers of Kimi K3 in full size: large tensors at the front of each file are seeded, the rest holes."""

    def change(config: dict[str, Any]) -> None:
        config["text_config"]["num_hidden_layers"] = layers

    make_giant("kimi-k3", folder, change)
    random = np.random.default_rng(0)
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "r+b") as file:
            length = int.from_bytes(file.read(8), "little")
            entries = json.loads(file.read(length))
            entries.pop("__metadata__")
            for start, stop in (entry["data_offsets"] for entry in entries.values()):
                if stop - start < LARGE or stop > filled:
                    continue
                file.seek(8 + length + start)
                for place in range(start, stop, STEP):
                    file.write(random.bytes(min(STEP, stop - place)))
            file.flush()
            os.fsync(file.fileno())
