"""A tiny random Kimi K3 with its vision tower, under the published names: `python -m tests.checkpoints.kimi_k3 OUT`.

Text as in the released layout, a file a layer; names, shapes and types are written out here again, so that an error in
the family table can't hide. The tower is smaller in every size, and no two of its sizes are equal.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.checkpoints.store import INDEX

HIDDEN, VOCABULARY, HEADS, DIM, ROPE, LORA = 128, 512, 6, 32, 16, 32
DENSE, LATENT, EXPERT, EXPERTS, SHARED = 288, 64, 96, 8, 192
LAYERS, MLA = 4, (3,)
PLACEHOLDER = 500
VISION: dict[str, Any] = {
    "patch_size": 14, "vt_hidden_size": 24, "vt_intermediate_size": 40, "vt_num_hidden_layers": 3,
    "vt_num_attention_heads": 3, "qkv_hidden_size": 48, "init_pos_emb_height": 8, "init_pos_emb_width": 6,
    "init_pos_emb_time": 4, "merge_kernel_size": [2, 2], "merge_type": "sd2_tpool", "norm_type": "rmsnorm",
    "mlp_type": "mlp2", "activation_func": "gelu_pytorch_tanh", "attn_bias": False, "linear_bias": False,
    "patch_embed_proj_bias": False, "pos_emb_type": "divided_fixed", "pos_emb_interpolation_mode": "bilinear",
    "mm_projector_type": "patchmergerv2", "mm_hidden_size": 24, "text_hidden_size": HIDDEN,
    "projector_hidden_act": "gelu", "projector_ln_eps": 1e-5,
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "dtype": "bfloat16",
    "tie_word_embeddings": False, "media_placeholder_token_id": PLACEHOLDER, "eos_token_id": 2, "vision_config": VISION,
    "text_config": {
        "model_type": "kimi_linear", "hidden_size": HIDDEN, "vocab_size": VOCABULARY, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "q_lora_rank": LORA, "kv_lora_rank": LORA,
        "qk_nope_head_dim": DIM, "qk_rope_head_dim": ROPE, "v_head_dim": DIM, "mla_use_nope": True,
        "mla_use_output_gate": True, "rms_norm_eps": 1e-5, "attn_res_block_size": 2, "hidden_act": "situ",
        "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0, "intermediate_size": DENSE,
        "first_k_dense_replace": 1, "num_experts": EXPERTS, "num_experts_per_token": 2, "num_shared_experts": 2,
        "moe_intermediate_size": EXPERT, "routed_expert_hidden_size": LATENT, "latent_moe_use_norm": True,
        "moe_router_activation_func": "sigmoid", "moe_renormalize": True, "routed_scaling_factor": 1.0,
        "num_expert_group": 1, "topk_group": 1, "moe_layer_freq": 1, "num_nextn_predict_layers": 0,
        "max_position_embeddings": 4096, "tie_word_embeddings": False,
        "linear_attn_config": {
            "full_attn_layers": [layer + 1 for layer in MLA],
            "kda_layers": [layer + 1 for layer in range(LAYERS) if layer not in MLA],
            "num_heads": HEADS, "head_dim": DIM, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
        },
        "quantization_config": {
            "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "format": "mxfp4-pack-quantized", "targets": ["Linear"],
                    "weights": {
                        "group_size": 32, "num_bits": 4, "type": "float", "strategy": "group", "symmetric": True,
                        "scale_dtype": "torch.uint8",
                    },
                }
            },
        },
    },
}  # fmt: skip


def make_kimi_k3(folder: Path, seed: int = 0) -> None:
    """Write the checkpoint: config.json, a file for each layer, three for what lies outside, the index."""
    random = torch.Generator().manual_seed(seed)
    groups = [dict(layer(number, random)) for number in range(LAYERS)]
    groups += [dict(outside(random)), dict(projector(random)), dict(tower(random))]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")
    weights: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05}-of-{len(groups):06}.safetensors"
        save_file(group, folder / name, metadata={"format": "pt"})
        weights |= dict.fromkeys(group, name)
    total = sum(tensor.nbytes for group in groups for tensor in group.values())
    index = {"metadata": {"total_size": total}, "weight_map": weights}
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")


def matrix(random: torch.Generator, *shape: int) -> Tensor:
    """bf16, of unit gain over all dimensions but the first."""
    return (torch.randn(shape, generator=random) / math.sqrt(math.prod(shape[1:]))).bfloat16()


def norm(random: torch.Generator, width: int) -> Tensor:
    """bf16 around 1."""
    return (1 + 0.2 * torch.randn(width, generator=random)).bfloat16()


def packed(random: torch.Generator, name: str, rows: int, columns: int) -> Iterator[tuple[str, Tensor]]:
    """Random E2M1 codes, two in a byte, and a power of two for each 32 of them."""
    yield f"{name}.weight_packed", torch.randint(0, 256, (rows, columns // 2), generator=random, dtype=torch.uint8)
    scale = torch.randint(123, 125, (rows, columns // 32), generator=random, dtype=torch.uint8)
    yield f"{name}.weight_scale", scale


def layer(number: int, random: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """One layer's tensors."""
    prefix = f"language_model.model.layers.{number}"
    for name in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"):
        yield f"{prefix}.{name}.weight", norm(random, HIDDEN)
    for name in ("self_attention_res_proj", "mlp_res_proj"):
        yield f"{prefix}.{name}.weight", matrix(random, 1, HIDDEN)
    attention = mla if number in MLA else kda
    yield from ((f"{prefix}.self_attn.{name}", tensor) for name, tensor in attention(random))
    if number == 0:
        yield from ((f"{prefix}.mlp.{name}", tensor) for name, tensor in mlp(random, DENSE))
    else:
        yield from ((f"{prefix}.block_sparse_moe.{name}", tensor) for name, tensor in moe(random))


def kda(random: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Linear attention: three projections with convolutions, decay, gate; A_log with its tail of zeros."""
    wide = HEADS * DIM
    for name in "qkv":
        yield f"{name}_proj.weight", matrix(random, wide, HIDDEN)
        yield f"{name}_conv1d.weight", 0.5 * torch.randn((wide, 1, 4), generator=random)
    yield "g_proj.weight", matrix(random, wide, HIDDEN)
    yield "f_a_proj.weight", matrix(random, DIM, HIDDEN)
    yield "f_b_proj.weight", matrix(random, wide, DIM)
    yield "b_proj.weight", matrix(random, HEADS, HIDDEN)
    yield "A_log", torch.cat([0.3 * torch.randn(HEADS, generator=random), torch.zeros(32 - HEADS)])
    yield "dt_bias", torch.randn(wide, generator=random)
    yield "o_norm.weight", 1 + 0.1 * torch.randn(DIM, generator=random)
    yield "o_proj.weight", matrix(random, HIDDEN, wide)


def mla(random: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Latent attention with an output gate."""
    yield "q_a_proj.weight", matrix(random, LORA, HIDDEN)
    yield "q_a_layernorm.weight", norm(random, LORA)
    yield "q_b_proj.weight", matrix(random, HEADS * (DIM + ROPE), LORA)
    yield "kv_a_proj_with_mqa.weight", matrix(random, LORA + ROPE, HIDDEN)
    yield "kv_a_layernorm.weight", norm(random, LORA)
    yield "kv_b_proj.weight", matrix(random, HEADS * 2 * DIM, LORA)
    yield "g_proj.weight", matrix(random, HEADS * DIM, HIDDEN)
    yield "o_proj.weight", matrix(random, HIDDEN, HEADS * DIM)


def mlp(random: torch.Generator, width: int) -> Iterator[tuple[str, Tensor]]:
    """Gate, up and down."""
    yield "gate_proj.weight", matrix(random, width, HIDDEN)
    yield "up_proj.weight", matrix(random, width, HIDDEN)
    yield "down_proj.weight", matrix(random, HIDDEN, width)


def moe(random: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Router, MXFP4 experts in the latent width, shared experts."""
    yield "gate.weight", 2 * matrix(random, EXPERTS, HIDDEN)
    yield "gate.e_score_correction_bias", 0.1 * torch.randn(EXPERTS, generator=random)
    yield "routed_expert_down_proj.weight", matrix(random, LATENT, HIDDEN)
    yield "routed_expert_norm.weight", norm(random, LATENT)
    yield "routed_expert_up_proj.weight", matrix(random, HIDDEN, LATENT)
    for expert in range(EXPERTS):
        yield from packed(random, f"experts.{expert}.w1", EXPERT, LATENT)
        yield from packed(random, f"experts.{expert}.w2", LATENT, EXPERT)
        yield from packed(random, f"experts.{expert}.w3", EXPERT, LATENT)
    yield from ((f"shared_experts.{name}", tensor) for name, tensor in mlp(random, SHARED))


def outside(random: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Embedding, last mixing of the residual bank, norm, head."""
    prefix = "language_model.model"
    yield f"{prefix}.embed_tokens.weight", torch.randn((VOCABULARY, HIDDEN), generator=random).bfloat16()
    yield f"{prefix}.output_attn_res_norm.weight", norm(random, HIDDEN)
    yield f"{prefix}.output_attn_res_proj.weight", matrix(random, 1, HIDDEN)
    yield f"{prefix}.norm.weight", norm(random, HIDDEN)
    yield "language_model.lm_head.weight", matrix(random, VOCABULARY, HIDDEN)


def projector(random: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """The patch merger."""
    wide = 4 * VISION["vt_hidden_size"]
    yield "mm_projector.proj.0.weight", matrix(random, wide, wide)
    yield "mm_projector.proj.2.weight", matrix(random, HIDDEN, wide)
    yield "mm_projector.post_norm.weight", norm(random, HIDDEN)


def tower(random: torch.Generator, sizes: dict[str, Any] = VISION) -> Iterator[tuple[str, Tensor]]:
    """MoonViT3d without biases."""
    width, wide, side = sizes["vt_hidden_size"], sizes["qkv_hidden_size"], sizes["patch_size"]
    table = (sizes["init_pos_emb_height"], sizes["init_pos_emb_width"], width)
    yield "vision_tower.patch_embed.proj.weight", matrix(random, width, 3, side, side)
    yield "vision_tower.patch_embed.pos_emb.weight", torch.randn(table, generator=random).bfloat16()
    for block in range(sizes["vt_num_hidden_layers"]):
        prefix = f"vision_tower.encoder.blocks.{block}"
        yield f"{prefix}.norm0.weight", norm(random, width)
        yield f"{prefix}.wqkv.weight", matrix(random, 3 * wide, width)
        yield f"{prefix}.wo.weight", matrix(random, width, wide)
        yield f"{prefix}.norm1.weight", norm(random, width)
        yield f"{prefix}.mlp.fc0.weight", matrix(random, sizes["vt_intermediate_size"], width)
        yield f"{prefix}.mlp.fc1.weight", matrix(random, width, sizes["vt_intermediate_size"])
    yield "vision_tower.encoder.final_layernorm.weight", norm(random, width)


if __name__ == "__main__":
    make_kimi_k3(Path(sys.argv[1]))
