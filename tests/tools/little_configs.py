"""The smallest configs that show everything a family's table can do: quantised, with experts, MTP, a tower."""

from __future__ import annotations

from typing import Any

from shard_plans.families.family import load_family
from tests.tools.little import Stored, little_tensors

Config = dict[str, Any]

BASE: Config = {
    "hidden_size": 8, "vocab_size": 12, "num_hidden_layers": 2, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA: Config = BASE | {
    "model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 8,
    "attention_bias": True, "tie_word_embeddings": True,
}  # fmt: skip
QWEN3_MOE: Config = BASE | {
    "model_type": "qwen3_moe", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "num_experts": 3,
    "num_experts_per_tok": 2, "moe_intermediate_size": 8, "intermediate_size": 8, "norm_topk_prob": True,
    "mlp_only_layers": [0], "decoder_sparse_step": 1,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 4]},
}  # fmt: skip
DEEPSEEK: Config = BASE | {
    "model_type": "deepseek_v3", "num_attention_heads": 2, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4, "v_head_dim": 4, "intermediate_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "moe_intermediate_size": 8, "n_group": 2, "topk_group": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "moe_layer_freq": 1, "num_nextn_predict_layers": 1,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 4]},
}  # fmt: skip
KIMI_K3: Config = {
    "model_type": "kimi_k3",
    "tie_word_embeddings": False,
    "text_config": BASE | {
        "hidden_act": "situ", "mla_use_nope": True, "mla_use_output_gate": True,
        "moe_router_activation_func": "sigmoid",
        "moe_layer_freq": 1, "num_nextn_predict_layers": 0, "num_attention_heads": 2, "q_lora_rank": 8,
        "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4, "intermediate_size": 8,
        "num_experts": 4, "num_experts_per_token": 2, "routed_expert_hidden_size": 8, "moe_intermediate_size": 8,
        "num_shared_experts": 1, "first_k_dense_replace": 1, "latent_moe_use_norm": True, "num_expert_group": 1,
        "topk_group": 1, "moe_renormalize": True, "routed_scaling_factor": 1.5, "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0, "attn_res_block_size": 2,
        "linear_attn_config": {
            "use_full_rank_gate": True, "num_heads": 2, "head_dim": 4, "short_conv_kernel_size": 4,
            "kda_layers": [1], "full_attn_layers": [2], "gate_lower_bound": -5.0,
        },
        "quantization_config": {
            "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized",
            "config_groups": {"group_0": {"weights": {"group_size": 4}}},
        },
    },
    "vision_config": {
        "mm_projector_type": "patchmergerv2", "merge_type": "sd2_tpool", "norm_type": "rmsnorm", "attn_bias": False,
        "linear_bias": False, "patch_embed_proj_bias": False, "vt_hidden_size": 4, "qkv_hidden_size": 4,
        "vt_intermediate_size": 8, "vt_num_hidden_layers": 2, "init_pos_emb_height": 2, "init_pos_emb_width": 2,
        "patch_size": 2, "merge_kernel_size": [2, 2],
    },
}  # fmt: skip
INT4: Config = DEEPSEEK | {
    "hidden_size": 16, "v_head_dim": 8, "intermediate_size": 16, "moe_intermediate_size": 16,
    "num_nextn_predict_layers": 0,
    "quantization_config": {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": {"group_size": 8}}},
    },
}  # fmt: skip
GPT_OSS: Config = BASE | {
    "model_type": "gpt_oss", "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4, "hidden_size": 32,
    "num_local_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 32, "attention_bias": True,
    "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "swiglu_limit": 7.0,
    "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
CONFIGS: dict[str, Config] = {
    "llama": LLAMA, "qwen3_moe": QWEN3_MOE, "deepseek_v3": DEEPSEEK, "kimi_k3": KIMI_K3, "int4": INT4,
    "gpt_oss": GPT_OSS,
}  # fmt: skip
PLANS: dict[str, tuple[dict[str, int], ...]] = {
    "llama": ({}, {"tp": 2, "pp": 2}, {"tp": 4, "dp": 2}),
    "qwen3_moe": ({"tp": 2, "ep": 2}, {"tp": 4, "ep": 1, "etp": 2}, {"pp": 2, "dp": 2, "ep": 2, "etp": 1}),
    "deepseek_v3": ({"tp": 2, "ep": 2}, {"tp": 2, "pp": 2, "ep": 1, "etp": 2}, {"dp": 3, "ep": 3}),
    "kimi_k3": ({"tp": 2, "ep": 2}, {"pp": 2, "dp": 2, "ep": 2}, {"tp": 2, "ep": 1, "etp": 2}),
    "int4": ({"tp": 2, "ep": 2}, {"tp": 2, "pp": 2, "ep": 1, "etp": 2}),
    "gpt_oss": ({"tp": 2, "ep": 2}, {"dp": 3, "ep": 3}),
}
"""Plans that fit, by the name of the config."""


def little(name: str, seed: int = 0) -> dict[str, Stored]:
    """The tensors of the config of that name."""
    import random

    return little_tensors(load_family(CONFIGS[name]), CONFIGS[name], random.Random(seed))
