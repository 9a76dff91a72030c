"""The block vocabulary that this runtime speaks: a word it doesn't know is refused before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shard_plans.errors import RuntimeFault
from shard_plans.families.model import Layer, Model

MODEL_CHOICES: Mapping[str, tuple[str, ...]] = {
    "stream": ("plain", "attn_res"),
    "norm": ("rms",),
    "tower": ("moonvit3d",),
}
MODEL_NUMBERS = frozenset({"eps", "res_block"})
LAYER_CHOICES: Mapping[str, tuple[str, ...]] = {
    "attn": ("gqa", "mla", "kda"),
    "qk_norm": ("per_head",),
    "rope": ("half", "interleaved", "none"),
    "softmax_scale": ("yarn_mscale2",),
    "decay": ("sigmoid",),
    "gate": ("full_rank",),
    "output_gate": ("elementwise",),
    "ffn": ("swiglu", "moe"),
    "act": ("silu", "situ"),
    "score": ("softmax", "sigmoid"),
    "group_score": ("top2_sum", "max"),
    "shared": ("added",),
}
LAYER_NUMBERS = frozenset(
    {"rope_part", "window", "latent_eps", "groups", "topk_groups", "scale", "decay_bound", "beta", "linear_beta"}
)
LAYER_SWITCHES = frozenset({"router_bias", "renormalize", "latent"})
NEEDED: Mapping[str, tuple[str, ...]] = {
    "": ("attn", "ffn", "act"),
    "gqa": ("rope",),
    "mla": ("rope", "latent_eps"),
    "kda": ("decay", "decay_bound", "gate"),
    "situ": ("beta", "linear_beta"),
    "moe": ("score",),
}
"""Words that a layer must have, always or beside a value of attn, ffn or act."""


def check_model(model: Model) -> None:
    """Raise RuntimeFault naming the first word of the model or of a layer to run that has no block here."""
    _check_words("model", model.words, MODEL_CHOICES, MODEL_NUMBERS, frozenset())
    for word in ("norm", "eps"):
        if model.words.get(word) is None:
            raise RuntimeFault(f"model: the family table {model.family} gives no {word}")
    block = model.words.get("res_block")
    if model.words.get("stream") == "attn_res" and (not isinstance(block, int) or block < 1):
        raise RuntimeFault(f"model: stream attn_res needs a res_block of at least 1 layer, found {block}")
    if not 0 < model.words["eps"] < 1:
        raise RuntimeFault(f"model: eps is {model.words['eps']}; a number between 0 and 1 is needed")
    _check_sizes(model)
    for layer in model.forward_layers:
        check_layer(model, layer)


def _check_sizes(model: Model) -> None:
    """Raise RuntimeFault for sizes that no forward pass can run with."""
    sizes = model.sizes
    for name in ("hidden", "vocab", "heads", "kv_heads", "head_dim", "experts", "topk", "kda_heads", "kda_dim", "taps"):
        if sizes.get(name) == 0:
            raise RuntimeFault(f"model: the size {name} is 0; it must be at least 1")
    for part, whole in (("kv_heads", "heads"), ("topk", "experts")):
        if part in sizes and whole in sizes and sizes[part] > sizes[whole]:
            raise RuntimeFault(f"model: {part} {sizes[part]} is more than {whole} {sizes[whole]}")
    if "kv_heads" in sizes and sizes["heads"] % sizes["kv_heads"]:
        raise RuntimeFault(f"model: {sizes['kv_heads']} kv_heads don't divide {sizes['heads']} heads")


def check_layer(model: Model, layer: Layer) -> None:
    """Raise RuntimeFault naming a word of this layer that has no block here, or one that is missing."""
    where = f"layer {layer.index}"
    if layer.mtp:
        raise RuntimeFault(f"{where} is a multi-token-prediction layer, which the forward pass doesn't run")
    _check_words(where, layer.words, LAYER_CHOICES, LAYER_NUMBERS, LAYER_SWITCHES)
    kinds = ("", *(layer.words.get(slot) for slot in ("attn", "ffn", "act")))
    for word in (word for kind in kinds for word in NEEDED.get(kind or "", ())):
        if layer.words.get(word) is None:
            raise RuntimeFault(f"{where}: the family table {model.family} gives no {word}")
    groups, chosen = layer.words.get("groups") or 1, layer.words.get("topk_groups") or 1
    experts = model.sizes.get("experts", 0)
    whole = type(groups) is int and type(chosen) is int
    if groups != 1 and not (whole and 1 <= chosen <= groups and experts % groups == 0):
        raise RuntimeFault(
            f"{where}: {chosen} of {groups} groups of {experts} experts; whole numbers that divide them are needed"
        )
    if groups > 1 and layer.words.get("group_score") is None:
        raise RuntimeFault(f"{where}: the family table {model.family} gives groups but no group_score")


def _check_words(
    where: str,
    words: Mapping[str, Any],
    choices: Mapping[str, tuple[str, ...]],
    numbers: frozenset[str],
    switches: frozenset[str],
) -> None:
    for word, value in words.items():
        if value is None:
            continue
        if word in choices:
            if value not in choices[word]:
                raise RuntimeFault(f"{where}: no block for {word}: {value}; the runtime has {', '.join(choices[word])}")
        elif word in numbers:
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise RuntimeFault(f"{where}: {word} is {value!r}, a number is needed")
        elif word in switches:
            if not isinstance(value, bool):
                raise RuntimeFault(f"{where}: {word} is {value!r}; the runtime has true and false")
        else:
            raise RuntimeFault(f"{where}: no block for {word}: {value}; the runtime doesn't know this word")
