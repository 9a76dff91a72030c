"""How large the table of cosines and sines is that engines keep for rotary embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shard_plans.families.model import Layer, Model
from shard_plans.memory.workload import LARGEST_COUNT


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
    part = words.get("rope_part", 1)
    return int(sizes.get("head_dim", 0) * part) if 0 < part <= 1 else 0


def _positions(text: Mapping[str, Any]) -> int:
    scaling = text.get("rope_scaling") or text.get("rope_parameters")
    if isinstance(scaling, Mapping) and "yarn" in (scaling.get("rope_type"), scaling.get("type")):
        original, factor = _number(scaling, "original_max_position_embeddings"), _number(scaling, "factor")
        if original and factor:
            return int(original * factor)
    return int(_number(text, "max_position_embeddings"))


def _number(section: Mapping[str, Any], key: str) -> float:
    """A number that positions are counted with; 0 where there is none, or what can't count them."""
    value = section.get(key)
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= LARGEST_COUNT
    return float(value) if known and value is not None else 0.0
