"""Shape of a plan document, as a JSON schema; what it means for a model is checked where the model is known."""

from __future__ import annotations

from typing import Any

from shard_plans.memory.amount import ENDS
from shard_plans.memory.workload import DISPATCHES, KV_DTYPES, LARGEST_COUNT

LARGEST_SIZE = 65536
"""Ranks along one axis, and ranks in all."""

_SIZE: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": LARGEST_SIZE}
_COUNT: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 2**62}
_TOKENS: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": LARGEST_COUNT}
_IDS: dict[str, Any] = {
    "type": ["string", "integer"],
    "minimum": 0,
    "pattern": "^[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*$",
    "description": "expert ids such as 0-3,7",
}
_SLOTS: dict[str, Any] = {
    "if": {"type": "array"},
    "then": {"minItems": 1, "items": _IDS},
    "else": {"const": "contiguous", "description": "`contiguous` or a list with the ids of each slot"},
}

PLAN_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["reshard_plan", "checkpoint", "parallel", "stages", "experts", "mtp", "strict_blocks"],
    "additionalProperties": False,
    "properties": {
        "reshard_plan": {"const": 1, "description": "1, the version that this reshard reads"},
        "checkpoint": {
            "type": "object",
            "required": ["family", "tensors", "bytes"],
            "oneOf": [{"required": ["fingerprint"]}, {"required": ["config"]}],
            "description": "the fingerprint of a checkpoint, or the digest of the config.json that was planned from",
            "additionalProperties": False,
            "properties": {
                "family": {"type": "string", "pattern": "^[a-z][a-z0-9_]{0,80}$", "description": "a family's name"},
                "fingerprint": {"type": "string", "pattern": "^[0-9a-f]{32}$", "description": "32 hex digits"},
                "config": {"type": "string", "pattern": "^[0-9a-f]{32}$", "description": "32 hex digits"},
                "tensors": _COUNT,
                "bytes": _COUNT,
            },
        },
        "parallel": {
            "type": "object",
            "required": ["tp", "pp", "dp", "ep", "etp"],
            "additionalProperties": False,
            "properties": {"tp": _SIZE, "pp": _SIZE, "dp": _SIZE, "ep": _SIZE, "etp": _SIZE},
        },
        "stages": {
            "type": "array",
            "minItems": 1,
            "maxItems": LARGEST_SIZE,
            "items": {
                "type": ["string", "integer"],
                "minimum": 0,
                "maximum": 999999,
                "pattern": "^[0-9]{1,6}(-[0-9]{1,6})?$",
                "description": "a layer or an inclusive range of layers such as 0-30",
            },
        },
        "experts": {
            "if": {"type": "object"},
            "then": {
                "required": ["count", "default"],
                "additionalProperties": False,
                "properties": {
                    "count": _SIZE,
                    "default": _SLOTS,
                    "layers": {
                        "type": "object",
                        "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,5})$", "description": "a layer's number"},
                        "additionalProperties": _SLOTS,
                    },
                },
            },
            "else": {"const": "none", "description": "`none`, or a mapping with count, default and layers"},
        },
        "mtp": {"enum": ["keep", "drop"]},
        "strict_blocks": {"type": "boolean"},
        "layout": {"type": "string", "pattern": "^[a-z][a-z0-9.@-]{0,40}$", "description": "a layout's name"},
        "weights": {"type": "object", "additionalProperties": {"type": "string"}},
        "cluster": {
            "type": "object",
            "required": ["nodes", "cards", "card", "memory"],
            "additionalProperties": False,
            "properties": {
                "nodes": _SIZE,
                "cards": _SIZE,
                "card": {"type": ["string", "integer"]},
                "memory": {"type": "integer", "minimum": 1, "maximum": 2**62},
            },
        },
        "workload": {
            "type": "object",
            "required": ["context", "concurrency", "kv_dtype", "prefill_chunk"],
            "additionalProperties": False,
            "properties": {
                "context": _TOKENS,
                "concurrency": _TOKENS,
                "kv_dtype": {"enum": list(KV_DTYPES)},
                "prefill_chunk": _TOKENS,
                "prefix": {**_TOKENS, "minimum": 0},
                "image_tokens": {**_TOKENS, "minimum": 0},
                "dispatch": {"enum": list(DISPATCHES)},
                "engine": {"type": "string", "maxLength": 40},
                "utilization": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
                "assume": {"enum": list(ENDS)},
            },
        },
        "fits": {"type": "boolean"},
        "ledger": {"type": "string"},
    },
}
