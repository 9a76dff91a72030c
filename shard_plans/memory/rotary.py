"""How large the table of cosines and sines is that engines keep for rotary embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shard_plans.families.model import Layer, Model


def rotary_tables(model: Model) -> int:
    """Numbers in a model's tables: positions x rotary width, one table for each width that its layers use.

    Under yarn the table reaches as far as the scaled range: original positions x factor.
    """
    widths = {_width(model, layer) for layer in model.forward_layers} - {0}
    return sum(width * _positions(model.text) for width in widths)


def _width(model: Model, layer: Layer) -> int:
    words, sizes = layer.words, model.sizes
    if words.get("rope", "none") == "none":
        return 0
    if words.get("attn") == "mla":
        return sizes.get("rope", 0)
    return int(sizes.get("head_dim", 0) * float(words.get("rope_part", 1)))


def _positions(text: Mapping[str, Any]) -> int:
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    longest = int(text.get("max_position_embeddings") or 0)
    kind = scaling.get("rope_type") or scaling.get("type")
    original, factor = scaling.get("original_max_position_embeddings"), scaling.get("factor")
    if kind == "yarn" and original and factor:
        return int(original * factor)
    return longest
