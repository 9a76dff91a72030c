"""The block vocabulary that this runtime speaks: a word it doesn't know is refused before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.blocks.images import SPOKEN
from runtime.blocks.rope import STYLES
from runtime.blocks.router import SCORES
from shard_plans.errors import RuntimeFault
from shard_plans.families.model import Layer, Model

MODEL_CHOICES: Mapping[str, tuple[str, ...]] = {
    "stream": ("plain", "attn_res", "hyper"),
    "norm": ("rms", "rms_zero_centred", "rms_cast_last"),
    "tower": tuple(SPOKEN),
}
MODEL_NUMBERS = frozenset({"eps", "res_block", "streams", "hyper_eps", "sinkhorn"})
LAYER_CHOICES: Mapping[str, tuple[Any, ...]] = {
    "attn": ("gqa", "mla", "kda", "gdn", "compressed"),
    "index": ("dsa", "block", "previous"),
    "index_rope": ("half", "interleaved"),
    "rope_kind": ("main", "compress"),
    "qk_norm": ("per_head", "all_heads", "l2"),
    "rope": ("none", *STYLES),
    "softmax_scale": ("yarn_mscale2",),
    "decay": ("sigmoid", "softplus"),
    "gate": ("full_rank", "low_rank"),
    "output_gate": ("elementwise", "per_head"),
    "sinks": (True,),
    "ffn": ("swiglu", "moe"),
    "act": ("silu", "silu_clamped", "gpt_oss", "situ"),
    "score": tuple(SCORES),
    "group_score": ("top2_sum", "max"),
    "router_bias": (True, False, "logits"),
    "renormalize": (True, False, "clamp"),
    "expert_sides": ("in_out", "in_out_unless_packed"),
    "expert_pairs": ("interleaved",),
    "shared": ("added", "gated"),
    "latent": (True, False),
}
LAYER_NUMBERS = frozenset({
    "index_topk", "index_block", "index_local", "rope_part", "window", "chunk", "temperature", "temperature_floor",
    "latent_eps", "groups", "topk_groups", "renormalize_min", "scale", "decay_bound", "alpha", "limit", "beta",
    "linear_beta", "compress", "overlap",
})  # fmt: skip
NEEDED: Mapping[str, tuple[str, ...]] = {
    "": ("attn", "ffn", "act"),
    "gqa": ("rope",),
    "mla": ("rope", "latent_eps"),
    "kda": ("decay", "gate"),
    "index dsa": ("index_rope", "index_topk"),
    "index block": ("index_block", "index_topk"),
    "decay sigmoid": ("decay_bound",),
    "compressed": ("window", "rope_kind"),
    "situ": ("beta", "linear_beta"),
    "gpt_oss": ("alpha", "limit"),
    "silu_clamped": ("limit",),
    "moe": ("score",),
    "renormalize clamp": ("renormalize_min",),
}
"""Words that a layer must have, always, beside a value of attn, ffn or act, or beside another word's value."""


def check_model(model: Model) -> None:
    """Raise RuntimeFault naming the first word of the model or of a layer to run that has no block here."""
    _check_words("model", model.words, MODEL_CHOICES, MODEL_NUMBERS)
    for word in ("norm", "eps"):
        if model.words.get(word) is None:
            raise RuntimeFault(f"model: the family table {model.family} gives no {word}")
    block = model.words.get("res_block")
    if model.words.get("stream") == "attn_res" and (not isinstance(block, int) or block < 1):
        raise RuntimeFault(f"model: stream attn_res needs a res_block of at least 1 layer, found {block}")
    if model.words.get("stream") == "hyper":
        for word in ("streams", "hyper_eps", "sinkhorn"):
            if model.words.get(word) is None:
                raise RuntimeFault(f"model: stream hyper needs {word}, and the family table {model.family} gives none")
    if not 0 < model.words["eps"] < 1:
        raise RuntimeFault(f"model: eps is {model.words['eps']}; a number between 0 and 1 is needed")
    _check_sizes(model)
    for layer in model.forward_layers:
        check_layer(model, layer)


def _check_sizes(model: Model) -> None:
    """Raise RuntimeFault for sizes that no forward pass can run with."""
    sizes = model.sizes
    for name in (
        "hidden",
        "vocab",
        "heads",
        "kv_heads",
        "head_dim",
        "experts",
        "topk",
        "kda_heads",
        "kda_dim",
        "taps",
        "key_heads",
        "per_key",
        "dk",
        "dv",
    ):
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
    _check_words(where, layer.words, LAYER_CHOICES, LAYER_NUMBERS)
    kinds = ["", *(layer.words.get(slot) for slot in ("attn", "ffn", "act"))]
    kinds += [f"{word} {value}" for word, value in layer.words.items()]
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
    choices: Mapping[str, tuple[Any, ...]],
    numbers: frozenset[str],
) -> None:
    for word, value in words.items():
        if value is None:
            continue
        if word in choices:
            if not any(value is known or (type(value) is str and value == known) for known in choices[word]):
                has = ", ".join(map(_spelt, choices[word]))
                raise RuntimeFault(f"{where}: no block for {word}: {_spelt(value)}; the runtime has {has}")
        elif word in numbers:
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise RuntimeFault(f"{where}: {word} is {value!r}, a number is needed")
        else:
            raise RuntimeFault(f"{where}: no block for {word}: {value}; the runtime doesn't know this word")


def _spelt(value: Any) -> str:
    """A word as the table has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
