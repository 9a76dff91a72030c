"""The block vocabulary that this runtime speaks: a word it doesn't know is refused before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shard_plans.errors import RuntimeFault
from shard_plans.families.model import Layer, Model

MODEL_CHOICES: Mapping[str, tuple[str, ...]] = {"stream": ("plain",), "norm": ("rms",)}
MODEL_NUMBERS = frozenset({"eps"})
LAYER_CHOICES: Mapping[str, tuple[str, ...]] = {
    "attn": ("gqa", "mla"),
    "qk_norm": ("per_head",),
    "rope": ("half", "interleaved"),
    "softmax_scale": ("yarn_mscale2",),
    "ffn": ("swiglu", "moe"),
    "act": ("silu",),
    "score": ("softmax", "sigmoid"),
    "group_score": ("top2_sum", "max"),
    "shared": ("added",),
}
LAYER_NUMBERS = frozenset({"rope_part", "window", "latent_eps", "groups", "topk_groups", "scale"})
LAYER_SWITCHES = frozenset({"router_bias", "renormalize"})
NEEDED: Mapping[str, tuple[str, ...]] = {
    "": ("attn", "ffn", "act", "rope"),
    "mla": ("latent_eps",),
    "moe": ("score",),
}
"""Words that a layer must have, always or beside a value of attn or ffn."""


def check_model(model: Model) -> None:
    """Raise RuntimeFault naming the first word of the model or of a layer to run that has no block here."""
    _check_words("model", model.words, MODEL_CHOICES, MODEL_NUMBERS, frozenset())
    for word in ("norm", "eps"):
        if model.words.get(word) is None:
            raise RuntimeFault(f"model: the family table {model.family} gives no {word}")
    for layer in model.forward_layers:
        check_layer(model, layer)


def check_layer(model: Model, layer: Layer) -> None:
    """Raise RuntimeFault naming a word of this layer that has no block here, or one that is missing."""
    where = f"layer {layer.index}"
    if layer.mtp:
        raise RuntimeFault(f"{where} is a multi-token-prediction layer, which the forward pass doesn't run")
    _check_words(where, layer.words, LAYER_CHOICES, LAYER_NUMBERS, LAYER_SWITCHES)
    kinds = ("", layer.words.get("attn"), layer.words.get("ffn"))
    for word in (word for kind in kinds for word in NEEDED.get(kind or "", ())):
        if layer.words.get(word) is None:
            raise RuntimeFault(f"{where}: the family table {model.family} gives no {word}")
    if (layer.words.get("groups") or 1) > 1 and layer.words.get("group_score") is None:
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
