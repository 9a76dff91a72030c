"""Kimi K3's layers written out plainly, token by token, in float64: what our blocks are measured against.

Nothing of the runtime computes here. Weights are random, none of them neutral; sizes are small and all different.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shard_plans.families.model import Layer, Model
from tests.tools.oracle import Oracle

TINY = Path(__file__).parent.parent / "checkpoints" / "kimi_k3_tiny"
"""A checkpoint in the released layout, and in expected.safetensors the logits that the published code makes of it."""
SIZES = {
    "hidden": 32, "heads": 6, "q_lora": 20, "kv_lora": 12, "nope": 8, "rope": 4, "v_dim": 10, "kda_heads": 6,
    "kda_dim": 7, "taps": 4, "ffn": 36, "experts": 8, "topk": 3, "latent": 16, "expert_ffn": 24, "shared_ffn": 18,
    "vocab": 64,
}  # fmt: skip
SITU = {"act": "situ", "beta": 4.0, "linear_beta": 25.0}
KDA = {"attn": "kda", "decay": "sigmoid", "decay_bound": -5.0, "gate": "full_rank"}
MLA = {"attn": "mla", "rope": "none", "latent_eps": 1e-6, "output_gate": "elementwise"}
DENSE = {"ffn": "swiglu", **SITU}
MOE = {
    "ffn": "moe", **SITU, "score": "sigmoid", "router_bias": True, "groups": 1, "topk_groups": 1,
    "group_score": "top2_sum", "renormalize": True, "scale": 1.5, "shared": "added", "latent": True,
}  # fmt: skip
EPS = 1e-5


def make_layer(words: Mapping[str, Any], index: int = 0, seed: int = 0, res_block: int = 3) -> Oracle:
    """A layer of these words with random weights in float64, and its description."""
    draw = torch.Generator().manual_seed(seed)
    whole = {name: _values(name, shape, draw) for name, shape in _shapes(words).items()}
    model_words = {"stream": "attn_res", "res_block": res_block, "norm": "rms", "eps": EPS}
    layer = Layer(index, {}, dict(words))
    return Oracle(None, None, Model("kimi", {}, {}, SIZES, (layer,), model_words, False), layer, whole)


def _shapes(words: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    s = SIZES
    hidden, dealt = s["hidden"], s["kda_heads"] * s["kda_dim"]
    shapes: dict[str, tuple[int, ...]] = {}
    for block in ("attn", "ffn"):
        shapes |= {f"{block}.norm": (hidden,), f"{block}.res_norm": (hidden,), f"{block}.res_proj": (1, hidden)}
    if words["attn"] == "kda":
        shapes |= {f"kda.{name}": (dealt, hidden) for name in "qkv"}
        shapes |= {f"kda.{name}_conv": (dealt, 1, s["taps"]) for name in "qkv"}
        shapes |= {"kda.f_a": (s["kda_dim"], hidden), "kda.f_b": (dealt, s["kda_dim"]), "kda.dt_bias": (dealt,)}
        shapes |= {"kda.b": (s["kda_heads"], hidden), "kda.A_log": (s["kda_heads"],), "kda.o_norm": (s["kda_dim"],)}
        shapes |= {"attn.gate": (dealt, hidden), "attn.o": (hidden, dealt)}
    else:
        heads, width = s["heads"], s["nope"] + s["rope"]
        shapes |= {"attn.q_a": (s["q_lora"], hidden), "attn.q_a_norm": (s["q_lora"],)}
        shapes |= {"attn.q_b": (heads * width, s["q_lora"]), "attn.kv_a": (s["kv_lora"] + s["rope"], hidden)}
        shapes |= {"attn.kv_a_norm": (s["kv_lora"],), "attn.kv_b": (heads * (s["nope"] + s["v_dim"]), s["kv_lora"])}
        shapes |= {"attn.gate": (heads * s["v_dim"], hidden), "attn.o": (hidden, heads * s["v_dim"])}
    units: dict[str, tuple[tuple[int, ...], int, int]] = {"mlp": ((), hidden, s["ffn"])}
    if words["ffn"] == "moe":
        latent, count = s["latent"], s["experts"]
        units = {"shared": ((), hidden, s["shared_ffn"]), "experts": ((count,), latent, s["expert_ffn"])}
        shapes |= {"moe.router": (count, hidden), "moe.router_bias": (count,), "moe.latent_norm": (latent,)}
        shapes |= {"moe.latent_down": (latent, hidden), "moe.latent_up": (hidden, latent)}
    for unit, (stack, width, inner) in units.items():
        shapes |= {f"{unit}.gate": (*stack, inner, width), f"{unit}.up": (*stack, inner, width)}
        shapes |= {f"{unit}.down": (*stack, width, inner)}
    return shapes


def _values(name: str, shape: tuple[int, ...], draw: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=draw, dtype=torch.float64)
    if "norm" in name:
        return 1 + 0.3 * noise
    if len(shape) == 1:
        return 0.5 * noise
    size = 4.0 if name in ("moe.router", "attn.res_proj", "ffn.res_proj") else 1.5
    return noise * (size / math.sqrt(shape[-1]))


def layer_plain(oracle: Oracle, total: Tensor, bank: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The layer as the facts write it: running sum [T, hidden] and bank -> both after the layer."""
    w, words, index = oracle.whole, oracle.layer.words, oracle.layer.index
    bank = list(bank)
    u = mix_plain(w["attn.res_norm"], w["attn.res_proj"], bank, total) if bank else total
    restart = index % oracle.model.words["res_block"] == 0
    if restart:
        bank.append(total)
    attention = kda_plain if words["attn"] == "kda" else mla_plain
    y = attention(w, rms(u, w["attn.norm"]))
    total = y if restart else total + y
    z = rms(mix_plain(w["ffn.res_norm"], w["ffn.res_proj"], bank, total), w["ffn.norm"])
    return total + (moe_plain(w, z, oracle.layer.words) if words["ffn"] == "moe" else unit_plain(w, "mlp", z)), bank


def rms(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    """Root-mean-square norm."""
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def mix_plain(norm: Tensor, proj: Tensor, bank: Sequence[Tensor], total: Tensor) -> Tensor:
    """Attention over the bank and the running sum."""
    candidates = [*bank, total]
    scores = torch.stack([rms(v, norm) @ proj[0] for v in candidates])
    return sum((a[:, None] * v for a, v in zip(scores.softmax(0), candidates, strict=True)), torch.zeros_like(total))


def kda_plain(w: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Kimi Delta Attention, a token and a head at a time."""
    heads, dim, taps = SIZES["kda_heads"], SIZES["kda_dim"], SIZES["taps"]
    mixed = {}
    for name in "qkv":
        raw = x @ w[f"kda.{name}"].T
        padded = torch.cat([raw.new_zeros(taps - 1, raw.shape[1]), raw])
        rows = [sum(padded[t + j] * w[f"kda.{name}_conv"][:, 0, j] for j in range(taps)) for t in range(len(x))]
        pre = torch.stack([torch.as_tensor(row) for row in rows])
        mixed[name] = (pre * pre.sigmoid()).view(-1, heads, dim)
    f = (x @ w["kda.f_a"].T @ w["kda.f_b"].T + w["kda.dt_bias"]).view(-1, heads, dim)
    beta, gate = (x @ w["kda.b"].T).sigmoid(), (x @ w["attn.gate"].T).sigmoid().view(-1, heads, dim)
    out = torch.zeros_like(mixed["v"])
    for h in range(heads):
        state = x.new_zeros(dim, dim)
        for t in range(len(x)):
            q, k, v = (mixed[name][t, h] for name in "qkv")
            q, k = q / (q @ q + 1e-6).sqrt() * dim**-0.5, k / (k @ k + 1e-6).sqrt()
            alpha = (-5 * (w["kda.A_log"][h].exp() * f[t, h]).sigmoid()).exp()
            state = alpha[:, None] * state
            state = state + beta[t, h] * torch.outer(k, v - k @ state)
            out[t, h] = q @ state
    return (rms(out, w["kda.o_norm"]) * gate).reshape(len(x), -1) @ w["attn.o"].T


def mla_plain(w: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Latent attention without rotation, with a gate, a token and a head at a time."""
    heads, nope, rope, v_dim, lora = (SIZES[name] for name in ("heads", "nope", "rope", "v_dim", "kv_lora"))
    q = (rms(x @ w["attn.q_a"].T, w["attn.q_a_norm"], 1e-6) @ w["attn.q_b"].T).view(-1, heads, nope + rope)
    low = x @ w["attn.kv_a"].T
    kv = (rms(low[:, :lora], w["attn.kv_a_norm"], 1e-6) @ w["attn.kv_b"].T).view(-1, heads, nope + v_dim)
    out = x.new_zeros(len(x), heads, v_dim)
    for h in range(heads):
        keys = torch.cat([kv[:, h, :nope], low[:, lora:]], dim=-1)
        for t in range(len(x)):
            shares = (keys[: t + 1] @ q[t, h] * (nope + rope) ** -0.5).softmax(0)
            out[t, h] = shares @ kv[: t + 1, h, nope:]
    return (out.reshape(len(x), -1) * (x @ w["attn.gate"].T).sigmoid()) @ w["attn.o"].T


def situ_plain(gate: Tensor, up: Tensor) -> Tensor:
    """K3's activation."""
    return 4 * (gate / 4).tanh() / (1 + (-gate).exp()) * 25 * (up / 25).tanh()


def unit_plain(w: Mapping[str, Tensor], unit: str, x: Tensor) -> Tensor:
    """A gated unit."""
    return situ_plain(x @ w[f"{unit}.gate"].T, x @ w[f"{unit}.up"].T) @ w[f"{unit}.down"].T


def moe_plain(w: Mapping[str, Tensor], x: Tensor, words: Mapping[str, Any]) -> Tensor:
    """LatentMoE, a token and an expert at a time."""
    scores = (x @ w["moe.router"].T).sigmoid()
    latent = x @ w["moe.latent_down"].T
    out = torch.zeros_like(latent)
    for t in range(len(x)):
        chosen = (scores[t] + w["moe.router_bias"]).argsort(descending=True)[: SIZES["topk"]]
        for e in chosen.tolist():
            share = scores[t, e] / (scores[t, chosen].sum() + 1e-20) * words["scale"]
            hidden = situ_plain(w["experts.gate"][e] @ latent[t], w["experts.up"][e] @ latent[t])
            out[t] += share * (w["experts.down"][e] @ hidden)
    if "moe.latent_norm" in w:
        out = rms(out, w["moe.latent_norm"])
    return out @ w["moe.latent_up"].T + unit_plain(w, "shared", x)
