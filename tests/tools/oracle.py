"""One transformers decoder layer of each family, the same layer in our vocabulary, and a cut by hand for its ranks.

Nothing here uses the family tables or the converter: names, sizes and cuts are written out again, so that an error
there can't hide here.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runtime.blocks.context import RankContext
from runtime.blocks.weights import LayerWeights, Stored
from runtime.comm.comm import Comm
from shard_plans.families.model import Layer, Model
from shard_plans.placement.experts import ExpertPlacement, contiguous
from shard_plans.placement.grid import Coordinate, Grid

YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.8, "mscale_all_dim": 1.1,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
BASE = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 64}
GQA = {**BASE, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 12, "intermediate_size": 48}
MLA = {
    **BASE, "rms_norm_eps": 1e-3, "num_attention_heads": 8, "num_key_value_heads": 8,
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "intermediate_size": 48, "moe_intermediate_size": 24, "n_shared_experts": 2, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1,
    "rope_parameters": YARN,
}  # fmt: skip
QWEN3_MOE = {
    **GQA, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True,
    "rope_parameters": PLAIN,
}  # fmt: skip
MLA_WORDS = {"attn": "mla", "rope": "interleaved", "latent_eps": 1e-6, "softmax_scale": "yarn_mscale2", "act": "silu"}
V3_MOE = {
    **MLA_WORDS, "ffn": "moe", "score": "sigmoid", "router_bias": True, "groups": 4, "topk_groups": 2,
    "group_score": "top2_sum", "renormalize": True, "scale": 2.5, "shared": "added",
}  # fmt: skip
GQA_WORDS = {"attn": "gqa", "rope": "half", "ffn": "swiglu", "act": "silu"}
SOFTMAX = {"attn": "gqa", "rope": "half", "ffn": "moe", "act": "silu", "score": "softmax", "renormalize": True}

CASES: Mapping[str, tuple[str, str, int, Mapping[str, Any], Mapping[str, Any]]] = {
    "llama": ("llama", "Llama", 0, {**GQA, "rope_parameters": LLAMA3}, GQA_WORDS),
    "llama_bias": ("llama", "Llama", 0, {**GQA, "rope_parameters": PLAIN, "attention_bias": True}, GQA_WORDS),
    "qwen2": ("qwen2", "Qwen2", 0, {**GQA, "rope_parameters": YARN}, GQA_WORDS),
    "qwen2_window": (
        "qwen2", "Qwen2", 1,
        {**GQA, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "rope_parameters": PLAIN},
        {**GQA_WORDS, "window": 5},
    ),
    "qwen3": ("qwen3", "Qwen3", 0, {**GQA, "rope_parameters": PLAIN}, {**GQA_WORDS, "qk_norm": "per_head"}),
    "glm4": (
        "glm4_moe", "Glm4Moe", 0,
        {**GQA, "first_k_dense_replace": 1, "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}},
        {**GQA_WORDS, "rope_part": 0.5},
    ),
    "v3_dense": ("deepseek_v3", "DeepseekV3", 0, MLA, {**MLA_WORDS, "ffn": "swiglu"}),
    "v3_direct": ("deepseek_v3", "DeepseekV3", 0, {**MLA, "q_lora_rank": None}, {**MLA_WORDS, "ffn": "swiglu"}),
    "mixtral": (
        "mixtral", "Mixtral", 0,
        {**GQA, "intermediate_size": 24, "num_local_experts": 6, "num_experts_per_tok": 2, "rope_parameters": PLAIN},
        SOFTMAX,
    ),
    "qwen3_moe": ("qwen3_moe", "Qwen3Moe", 0, QWEN3_MOE, {**SOFTMAX, "qk_norm": "per_head"}),
    "qwen3_moe_raw": (
        "qwen3_moe", "Qwen3Moe", 0, {**QWEN3_MOE, "norm_topk_prob": False},
        {**SOFTMAX, "qk_norm": "per_head", "renormalize": False},
    ),
    "v3_moe": ("deepseek_v3", "DeepseekV3", 1, MLA, V3_MOE),
}  # fmt: skip
"""Name -> transformers module, class prefix, layer, config, and the words our runtime gets."""

SIZES = {
    "hidden": "hidden_size", "vocab": "vocab_size", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim", "ffn": "intermediate_size", "q_lora": "q_lora_rank", "kv_lora": "kv_lora_rank",
    "nope": "qk_nope_head_dim", "rope": "qk_rope_head_dim", "v_dim": "v_head_dim", "topk": "num_experts_per_tok",
}  # fmt: skip
ROLES = {
    "input_layernorm": "attn.norm", "post_attention_layernorm": "ffn.norm", "self_attn.q_proj": "attn.q",
    "self_attn.k_proj": "attn.k", "self_attn.v_proj": "attn.v", "self_attn.o_proj": "attn.o",
    "self_attn.q_norm": "attn.q_norm", "self_attn.k_norm": "attn.k_norm", "self_attn.q_a_proj": "attn.q_a",
    "self_attn.q_a_layernorm": "attn.q_a_norm", "self_attn.q_b_proj": "attn.q_b", "mlp.gate": "moe.router",
    "self_attn.kv_a_proj_with_mqa": "attn.kv_a", "self_attn.kv_a_layernorm": "attn.kv_a_norm",
    "self_attn.kv_b_proj": "attn.kv_b", "mlp.gate_proj": "mlp.gate", "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down", "mlp.shared_experts.gate_proj": "shared.gate",
    "mlp.shared_experts.up_proj": "shared.up", "mlp.shared_experts.down_proj": "shared.down",
}  # fmt: skip
TP_ROWS = (
    "attn.q", "attn.q_b", "attn.kv_b", "attn.gate", "mlp.gate", "mlp.up", "shared.gate", "shared.up", "kda.q", "kda.k",
    "kda.v", "kda.q_conv", "kda.k_conv", "kda.v_conv", "kda.f_b", "kda.b", "kda.A_log", "kda.dt_bias",
)  # fmt: skip
TP_COLUMNS = ("attn.o", "mlp.down", "shared.down")


@dataclass(frozen=True, slots=True, eq=False)
class Oracle:
    """One layer: transformers' module, our description of it, and its whole weights by native name."""

    hf: Any
    rotary: Any
    model: Model
    layer: Layer
    whole: dict[str, Tensor]

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """What transformers makes of x [T, hidden]."""
        positions = torch.arange(x.shape[0]) if positions is None else positions
        ago = positions[:, None] - positions
        mask = torch.zeros(ago.shape, dtype=x.dtype).masked_fill(ago < 0, float("-inf"))
        window = self.layer.words.get("window")
        if window is not None:
            mask = mask.masked_fill(ago >= window, float("-inf"))
        turns = self.rotary(x[None], positions[None])
        with torch.no_grad():
            y: Tensor = self.hf(x[None], attention_mask=mask[None, None], position_embeddings=turns)[0]
        return y


def make(name: str, seed: int = 0) -> Oracle:
    """The case `name` with random weights, none of them neutral."""
    module, prefix, index, arguments, words = CASES[name]
    code = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    config = getattr(importlib.import_module("transformers"), f"{prefix}Config")(**deepcopy(dict(arguments)))
    config._attn_implementation = config._experts_implementation = "eager"
    hf = getattr(code, f"{prefix}DecoderLayer")(config, index).eval()
    generator = torch.Generator().manual_seed(seed)
    whole: dict[str, Tensor] = {}
    for key, tensor in hf.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator)
        if "norm" in key:
            tensor.copy_(1 + 0.3 * noise)
        elif tensor.dim() == 1:
            tensor.copy_(0.2 * noise)
        else:
            tensor.copy_(noise * (4 if key == "mlp.gate.weight" else 1.5) / tensor.shape[-1] ** 0.5)
        whole.update(native(key, tensor))
    sizes = {size: arguments[key] for size, key in SIZES.items() if arguments.get(key) is not None}
    if "experts" in "".join(whole):
        sizes["experts"], rows = whole["experts.gate"].shape[:2]
        sizes |= {"expert_ffn": rows, "shared_ffn": arguments.get("n_shared_experts", 0) * rows}
    layer = Layer(index, {}, dict(words))
    eps = config.rms_norm_eps
    model = Model(name, arguments, arguments, sizes, (layer,), {"stream": "plain", "norm": "rms", "eps": eps}, False)
    return Oracle(hf, getattr(code, f"{prefix}RotaryEmbedding")(config), model, layer, whole)


def native(key: str, tensor: Tensor) -> dict[str, Tensor]:
    """A tensor of transformers' module under its native name; its fused experts are taken apart."""
    tensor = tensor.clone()
    if key == "mlp.experts.gate_up_proj":
        gate, up = tensor.chunk(2, dim=1)
        return {"experts.gate": gate, "experts.up": up}
    if key == "mlp.experts.down_proj":
        return {"experts.down": tensor}
    if key == "mlp.gate.e_score_correction_bias":
        return {"moe.router_bias": tensor}
    stem, _, kind = key.rpartition(".")
    return {ROLES[stem] + (".bias" if kind == "bias" else ""): tensor}


def context(
    oracle: Oracle, grid: Grid, comm: Comm, compute: torch.dtype = torch.float32, experts: ExpertPlacement | None = None
) -> RankContext:
    """The rank's context; experts contiguous unless given."""
    placed = experts or ExpertPlacement(contiguous(oracle.model.sizes.get("experts", 0), grid.ep))
    at = grid.coordinate(comm.rank)
    return RankContext(grid, at, comm, oracle.model, placed, compute, torch.device("cpu"))


def cut(oracle: Oracle, ctx: RankContext, fuse: bool = True) -> LayerWeights:
    """What the rank of `ctx` holds of the layer: sliced by hand; fused and stacked, or apart and listed."""
    grid, at, sizes = ctx.grid, ctx.at, oracle.model.sizes
    held = ctx.experts.slots(oracle.layer.index, grid)[at.edp * grid.ep + at.ep] if "experts" in sizes else ()
    parts: dict[str, Tensor] = {}
    for name, tensor in oracle.whole.items():
        role = name.removesuffix(".bias")
        if role.startswith("experts."):
            dim = 2 if role == "experts.down" else 1
            parts[name] = tensor[list(held)].chunk(grid.etp, dim)[at.etp].contiguous()
        elif role in ("attn.k", "attn.v"):
            parts[name] = kv_part(tensor, sizes["kv_heads"], grid, at)
        elif role in TP_ROWS:
            parts[name] = tensor.chunk(grid.tp, 0)[at.tp]
        elif role in TP_COLUMNS and name == role:
            parts[name] = tensor.chunk(grid.tp, 1)[at.tp]
        else:
            parts[name] = tensor
    if fuse:
        for fused, names in {
            "attn.qkv": ("attn.q", "attn.k", "attn.v"),
            "mlp.gate_up": ("mlp.gate", "mlp.up"),
            "shared.gate_up": ("shared.gate", "shared.up"),
            "experts.gate_up": ("experts.gate", "experts.up"),
        }.items():
            for suffix in ("", ".bias"):
                members = [n + suffix for n in names]
                if all(n in parts for n in members) and len(members) > 1:
                    parts[fused + suffix] = join([parts.pop(n) for n in members], 1 if "experts" in fused else 0)
        return {name: Stored(tensor) for name, tensor in parts.items()}
    return {
        name: tuple(Stored(matrix) for matrix in tensor) if name.startswith("experts.") else Stored(tensor)
        for name, tensor in parts.items()
    }


def kv_part(tensor: Tensor, kv_heads: int, grid: Grid, at: Coordinate) -> Tensor:
    """The KV heads of one rank: its share, or the one head it repeats."""
    if kv_heads >= grid.tp:
        return tensor.chunk(grid.tp, 0)[at.tp]
    return tensor.chunk(kv_heads, 0)[at.tp // (grid.tp // kv_heads)]


def join(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """One tensor after the other along `dim`."""
    return torch.cat(list(tensors), dim=dim)


def relative(ours: Tensor, reference: Tensor) -> float:
    """||ours - reference|| / ||reference||."""
    return float((ours.double() - reference.double()).norm() / reference.double().norm())


def tokens(count: int, width: int = 32, seed: int = 7) -> Tensor:
    """Random activations [count, width]."""
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
