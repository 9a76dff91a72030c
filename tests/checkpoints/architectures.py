"""Tiny checkpoints of the further architectures that have a family table: configurations, and names as published."""

from __future__ import annotations

from tests.checkpoints.variants import BASE, DEEPSEEK_V3, GQA, HIDDEN, LLAMA3, QWEN3_MOE, ROPE, YARN, Config, Variant

MLA: Config = {key: value for key, value in DEEPSEEK_V3.items() if key != "num_nextn_predict_layers"}
NO_GROUPS: Config = {"n_group": 1, "topk_group": 1}
INDEXER: Config = {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 8}  # with few heads many scores are 0
PLAIN_YARN: Config = {key: value for key, value in YARN.items() if not key.startswith("mscale")}
AXIAL: Config = {"rope_type": "axial", "rope_theta": 10000.0}
MOE: Config = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32}
TOKENS: Config = {
    "image_token_id": 250, "video_token_id": 251, "vision_start_token_id": 252, "vision_end_token_id": 253,
    "tie_word_embeddings": False,
}  # fmt: skip
LINEAR = ["linear_attention", "linear_attention", "full_attention"]


def part(share: float, rope: Config = ROPE) -> Config:
    """RoPE on a share of each head."""
    return {"rope_parameters": rope | {"partial_rotary_factor": share}}


GPT_OSS = GQA | {
    "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": PLAIN_YARN | {"truncate": False},
}  # fmt: skip
DEEPSEEK_V4: Config = BASE | {
    "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 32, "q_lora_rank": 32,
    "moe_intermediate_size": 32, "n_routed_experts": 16, "n_shared_experts": 1, "num_experts_per_tok": 4,
    "o_groups": 2, "o_lora_rank": 16, "index_n_heads": 16, "index_head_dim": 16, "index_topk": 2,
    "partial_rotary_factor": 0.25, "qk_rope_head_dim": 8, "sliding_window": 8, "hc_mult": 2,
    "hc_sinkhorn_iters": 4, "num_nextn_predict_layers": 0,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
}  # fmt: skip
DEEPSEEK_V4_NAMES = (
    (r"^model\.", ""),
    (r"^embed_tokens\.", "embed."),
    (r"^hc_head\.hc_", "hc_head_"),
    (r"\.attn\.norm\.", ".attn.kv_norm."),
)
DEEPSEEK_V4_FLOAT32 = r"hc_|attn_sink|\.ape$"
KIMI_K25: Config = TOKENS | {
    "text_config": DEEPSEEK_V3 | NO_GROUPS | {"model_type": "deepseek_v3"},
    "vision_config": {
        "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2, "patch_size": 14,
        "pos_emb_height": 8, "pos_emb_width": 8, "pos_emb_time": 4, "merge_kernel_size": [2, 2],
        "rope_parameters": AXIAL,
    },
    "projection_hidden_size": 32,
}  # fmt: skip
KIMI_K25_NAMES = (
    (r"^language_model\.model\.blocks\.", "language_model.model.layers."),
    (r"^model\.mm_projector\.", "mm_projector."),
    (r"^vision_tower\.encoder\.patch_embed\.", "vision_tower.patch_embed."),
)
KIMI_K25_CLASSES = ("Kimi_K25Config", "Kimi_K25ForConditionalGeneration")

WIDE: Config = MLA | {
    "hidden_size": 7168, "num_hidden_layers": 2, "qk_rope_head_dim": 16, "intermediate_size": 128,
    "n_shared_experts": 4,
}  # fmt: skip
"""As wide as DeepSeek-V3, whose inference code goes by it, and eight ranks of whole blocks; little else."""
DEEPSEEK_FP8 = r"(self_attn|mlp)\..*proj(_with_mqa)?\.weight$"
DEEPSEEKS: dict[str, Variant] = {
    "deepseek_v3_wide": Variant("deepseek_v3", "DeepseekV3", WIDE),
    "deepseek_v3_wide_fp8": Variant("deepseek_v3", "DeepseekV3", WIDE, fp8=DEEPSEEK_FP8, mtp_layers=1),
    "deepseek_v3_wide_ragged": Variant("deepseek_v3", "DeepseekV3", WIDE | {"qk_rope_head_dim": 8}, fp8=DEEPSEEK_FP8),
    "deepseek_v32_wide": Variant("deepseek_v32", "DeepseekV32", WIDE | INDEXER),
}

QWEN3_NEXT: Config = GQA | MOE | part(0.25) | {
    "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "layer_types": LINEAR,
}  # fmt: skip
LLAMA4: Config = GQA | {
    "intermediate_size": 48, "intermediate_size_mlp": 96, "num_local_experts": 8, "num_experts_per_tok": 1,
    "moe_layers": [1, 2], "no_rope_layers": [1, 1, 0], "attention_chunk_size": 16, "use_qk_norm": True,
    "rope_parameters": LLAMA3, "layer_types": ["chunked_attention", "chunked_attention", "full_attention"],
    "floor_scale": 4,
}  # fmt: skip
LLAMA4_CLASSES = ("Llama4TextConfig", "Llama4ForCausalLM")
ENGINES: dict[str, Variant] = {
    "llama4_even": Variant(
        "llama4", "Llama4", LLAMA4 | {"moe_layers": [1], "interleave_moe_layer_step": 2}, classes=LLAMA4_CLASSES
    ),
    "gpt_oss_wide": Variant("gpt_oss", "GptOss", GPT_OSS | {"intermediate_size": 128, "num_key_value_heads": 4}),
    "qwen3_next_wide": Variant(
        "qwen3_next", "Qwen3Next", QWEN3_NEXT | {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
    ),
    "qwen3_moe_tied": Variant("qwen3_moe", "Qwen3Moe", QWEN3_MOE | {"tie_word_embeddings": True}),
}
"""As serving engines read their configs; of gpt_oss 32 columns a rank and a KV head at tp 4, which vLLM needs, and of
qwen3_next a key head."""

ARCHITECTURES: dict[str, Variant] = {
    "glm4_moe": Variant(
        "glm4_moe",
        "Glm4Moe",
        GQA
        | NO_GROUPS
        | part(0.5)
        | {
            "n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 1, "moe_intermediate_size": 32,
            "norm_topk_prob": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "use_qk_norm": True,
            "attention_bias": True, "num_nextn_predict_layers": 0,
        },
    ),
    "gpt_oss": Variant("gpt_oss", "GptOss", GPT_OSS),
    "gpt_oss_mxfp4": Variant("gpt_oss", "GptOss", GPT_OSS, mxfp4=r"mlp\.experts\.(gate_up|down)_proj$"),
    "minimax_m2": Variant(
        "minimax_m2", "MiniMaxM2", GQA | part(0.5) | {"num_local_experts": 16, "num_experts_per_tok": 4}
    ),
    "deepseek_v2": Variant(
        "deepseek_v2",
        "DeepseekV2",
        MLA
        | {
            "norm_topk_prob": False, "n_shared_experts": 2, "topk_method": "group_limited_greedy",
            "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek_v32": Variant("deepseek_v32", "DeepseekV32", MLA | INDEXER),
    "glm_moe_dsa": Variant(
        "glm_moe_dsa",
        "GlmMoeDsa",
        MLA | INDEXER | NO_GROUPS | {"rope_parameters": ROPE, "indexer_types": ["full", "shared", "full"]},
    ),
    "deepseek_v4": Variant(
        "deepseek_v4", "DeepseekV4", DEEPSEEK_V4, names=DEEPSEEK_V4_NAMES, float32=DEEPSEEK_V4_FLOAT32
    ),
    "deepseek_v4_fp4": Variant(
        "deepseek_v4",
        "DeepseekV4",
        DEEPSEEK_V4,
        names=DEEPSEEK_V4_NAMES,
        float32=DEEPSEEK_V4_FLOAT32,
        fp8_scale=r"attn\.(indexer\.)?(wq_a|wq_b|wkv|wo_a|wo_b)\.weight$|shared_experts\.w.\.weight$",
        fp4_scale=r"ffn\.experts\..*\.weight$",
    ),
    "ernie4_5_moe": Variant(
        "ernie4_5_moe",
        "Ernie4_5_Moe",
        GQA
        | {
            "moe_num_experts": 16, "moe_k": 4, "moe_num_shared_experts": 1, "moe_intermediate_size": 32,
            "moe_layer_start_index": 1, "moe_layer_end_index": 2,
        },
    ),
    "qwen3_next": Variant("qwen3_next", "Qwen3Next", QWEN3_NEXT),
    "kimi_linear": Variant(
        "kimi_linear",
        "KimiLinear",
        BASE
        | {
            "rms_norm_eps": 1e-5, "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": None,
            "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
            "intermediate_size": 96, "num_experts": 16, "num_experts_per_token": 4, "num_shared_experts": 1,
            "moe_intermediate_size": 32, "num_expert_group": 1, "topk_group": 1, "moe_renormalize": True,
            "routed_scaling_factor": 2.446, "linear_head_dim": 24, "linear_num_heads": 4, "linear_conv_kernel_dim": 4,
            "layer_types": LINEAR, "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
        names=((r"\.block_sparse_moe\.(gate|up|down)_proj\.", r".mlp.\1_proj."),),  # of the dense layers
    ),
    "llama4_text": Variant("llama4", "Llama4", LLAMA4, classes=LLAMA4_CLASSES),
    "kimi_k25": Variant("kimi_k25", "", KIMI_K25, classes=KIMI_K25_CLASSES, names=KIMI_K25_NAMES),
    "kimi_k25_int4": Variant(
        "kimi_k25",
        "",
        KIMI_K25,
        classes=KIMI_K25_CLASSES,
        names=KIMI_K25_NAMES,
        int4=r"language_model.*mlp\.experts\..*proj\.weight$",
    ),
    "qwen3_vl_moe": Variant(
        "qwen3_vl_moe",
        "",
        TOKENS
        | {
            "text_config": GQA
            | MOE
            | {
                "moe_intermediate_size": 48, "mlp_only_layers": [], "decoder_sparse_step": 1,
                "rope_parameters": ROPE | {"mrope_section": [4, 2, 2], "mrope_interleaved": True},
            },
            "vision_config": {
                "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 16,
                "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": HIDDEN,
                "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1], "rope_parameters": AXIAL,
            },
        },
        classes=("Qwen3VLMoeConfig", "Qwen3VLMoeForConditionalGeneration"),
        turned=r"mlp\.experts\.(gate_up|down)_proj$",
    ),
    "qwen3_5_moe": Variant(
        "qwen3_5_moe",
        "",
        TOKENS
        | {
            "text_config": GQA
            | MOE
            | {
                "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
                "layer_types": LINEAR, "tie_word_embeddings": False, "mtp_num_hidden_layers": 0,
                "rope_parameters": ROPE
                | {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1], "mrope_interleaved": True},
            },
            "vision_config": {
                "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 16,
                "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": HIDDEN,
                "num_position_embeddings": 64, "deepstack_visual_indexes": [], "rope_parameters": AXIAL,
            },
        },
        classes=("Qwen3_5MoeConfig", "Qwen3_5MoeForConditionalGeneration"),
        stacked=True,
        float32=r"linear_attn\.(A_log|norm\.weight)$",
    ),
    "minimax_m3_vl": Variant(
        "minimax_m3_vl",
        "",
        {
            "text_config": GQA
            | part(0.5)
            | {
                "intermediate_size": 32, "dense_intermediate_size": 96, "shared_intermediate_size": 32,
                "num_local_experts": 16, "num_experts_per_tok": 4, "routed_scaling_factor": 2.0, "rotary_dim": 8,
                "index_n_heads": 2, "index_head_dim": 16, "index_block_size": 4, "index_topk_blocks": 2,
                "index_local_blocks": 1, "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
                "mlp_layer_types": ["dense", "sparse", "sparse"],
            },
            "vision_config": {
                "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2,
                "patch_size": 14, "image_size": 56,
            },
            "projector_hidden_size": 32, "image_token_index": 250, "video_token_index": 251,
            "tie_word_embeddings": False,
        },
        classes=("MiniMaxM3VLConfig", "MiniMaxM3SparseForConditionalGeneration"),
    ),
}  # fmt: skip
