"""Which tiny checkpoints there are: for each a transformers class, its configuration, and how it is stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Config = dict[str, Any]

VOCABULARY, HIDDEN, TOKENS = 256, 64, 24
"""Rows of the embedding, width of the stream, length of the reference."""

ROPE: Config = {"rope_type": "default", "rope_theta": 10000.0}
YARN: Config = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
LLAMA3: Config = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
BASE: Config = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": 3, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GQA: Config = BASE | {
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96,
    "rope_parameters": ROPE,
}  # fmt: skip
QWEN2: Config = {key: value for key, value in GQA.items() if key != "head_dim"} | {"tie_word_embeddings": True}
MIXTRAL: Config = GQA | {"num_local_experts": 8, "num_experts_per_tok": 2}
QWEN3_MOE: Config = GQA | {
    "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "norm_topk_prob": True,
    "mlp_only_layers": [], "decoder_sparse_step": 1,
}  # fmt: skip
DEEPSEEK_V3: Config = BASE | {
    "rms_norm_eps": 1e-5, "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 32, "kv_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "intermediate_size": 96, "n_routed_experts": 16,
    "num_experts_per_tok": 4, "n_shared_experts": 1, "moe_intermediate_size": 32, "n_group": 4, "topk_group": 2,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "rope_parameters": YARN,
    "num_nextn_predict_layers": 0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Variant:
    """One tiny checkpoint."""

    module: str
    """transformers.models.<module>."""
    model: str
    """Prefix of the classes: Llama -> LlamaConfig, LlamaForCausalLM."""
    config: Mapping[str, Any]
    fp8: str | None = None
    """Names of the weights that are stored as FP8 with block scales: a regular expression."""
    int4: str | None = None
    """The same for INT4 groups."""
    mxfp4: str | None = None
    """The same for gpt-oss's MXFP4."""
    fp8_scale: str | None = None
    """The same for DeepSeek-V4's FP8."""
    fp4_scale: str | None = None
    """The same for its FP4 experts."""
    classes: tuple[str, str] | None = None
    """Classes of the configuration and of the model, where `model` doesn't give them."""
    names: tuple[tuple[str, str], ...] = ()
    """What transformers writes otherwise than its publisher did: regular expressions and their replacements."""
    float32: str | None = None
    """Tensors that are published in fp32: a regular expression over published names."""
    stacked: bool = False
    """Experts are published in one piece [expert, out, in], gate and up one behind the other, and written apart."""
    turned: str | None = None
    """Stacked experts that are published [expert, in, out] and written the other way round: the same."""

    @property
    def configuration(self) -> str:
        """Class of the configuration."""
        return self.classes[0] if self.classes else f"{self.model}Config"

    @property
    def network(self) -> str:
        """Class of the model."""
        return self.classes[1] if self.classes else f"{self.model}ForCausalLM"

    mtp_layers: int = 0
    """Multi-token-prediction layers stored behind the last layer; transformers doesn't run them."""
    respell: Callable[[Config], Config] | None = None
    """Another spelling of config.json that means the same."""
    files: int = 3
    """Files wanted; 1 means model.safetensors without an index."""


def old_rope(config: Config) -> Config:
    """`rope_theta` and `rope_scaling`, as published before transformers 5, instead of `rope_parameters`."""
    config = dict(config)
    rope = dict(config.pop("rope_parameters"))
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else rope | {"type" if kind == "yarn" else "rope_type": kind}
    return config


DEEPSEEK_FP8 = r"(self_attn|mlp)\..*proj(_with_mqa)?\.weight$"
QWEN_FP8 = r"(self_attn|mlp)\..*proj\.weight$"

VARIANTS: dict[str, Variant] = {
    "llama": Variant("llama", "Llama", GQA | {"rope_parameters": LLAMA3}),
    "qwen2": Variant("qwen2", "Qwen2", QWEN2),
    "qwen3": Variant("qwen3", "Qwen3", GQA),
    "mixtral": Variant("mixtral", "Mixtral", MIXTRAL),
    "qwen3_moe": Variant("qwen3_moe", "Qwen3Moe", QWEN3_MOE),
    "deepseek_v3": Variant("deepseek_v3", "DeepseekV3", DEEPSEEK_V3),
    "qwen3_moe_fp8": Variant("qwen3_moe", "Qwen3Moe", QWEN3_MOE, fp8=QWEN_FP8),
    "deepseek_v3_fp8": Variant("deepseek_v3", "DeepseekV3", DEEPSEEK_V3, fp8=DEEPSEEK_FP8),
    # Edges of the same six families.
    "deepseek_v3_mtp": Variant("deepseek_v3", "DeepseekV3", DEEPSEEK_V3, fp8=DEEPSEEK_FP8, mtp_layers=1),
    "deepseek_v3_full_q": Variant("deepseek_v3", "DeepseekV3", DEEPSEEK_V3 | {"q_lora_rank": None}),
    "deepseek_v3_old_rope": Variant("deepseek_v3", "DeepseekV3", DEEPSEEK_V3, respell=old_rope),
    "llama_single": Variant("llama", "Llama", GQA | {"rope_parameters": LLAMA3}, files=1),
    "llama_bias": Variant("llama", "Llama", GQA | {"attention_bias": True}),
    "llama_odd": Variant(
        "llama",
        "Llama",
        GQA | {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 250},
    ),
    "llama_old_rope": Variant("llama", "Llama", GQA | {"rope_parameters": LLAMA3}, respell=old_rope),
    "qwen2_fp8": Variant("qwen2", "Qwen2", QWEN2, fp8=QWEN_FP8),
    "qwen2_untied": Variant("qwen2", "Qwen2", QWEN2 | {"tie_word_embeddings": False}),
    "mixtral_window": Variant("mixtral", "Mixtral", MIXTRAL | {"sliding_window": 8}),
    "mixtral_odd": Variant("mixtral", "Mixtral", MIXTRAL | {"num_local_experts": 5}),
    "qwen3_moe_mixed": Variant("qwen3_moe", "Qwen3Moe", QWEN3_MOE | {"mlp_only_layers": [1]}),
}
MAIN = (
    "llama", "qwen2", "qwen3", "mixtral", "qwen3_moe", "deepseek_v3", "qwen3_moe_fp8", "deepseek_v3_fp8"
)  # fmt: skip
"""The eight that every plan of the main job is tried on."""
EDGES = tuple(name for name in VARIANTS if name not in MAIN)
