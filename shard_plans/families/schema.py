"""Shape of a family table, as a JSON schema; rows, dimensions and expressions are read by their own parsers."""

from __future__ import annotations

from typing import Any

from shard_plans.families.formats import format_names

_EXPRESSION: dict[str, Any] = {
    "anyOf": [
        {"type": ["string", "integer"]},
        {"type": "array", "items": {"type": ["string", "integer"]}, "minItems": 1},
    ]
}
_REMOVED: dict[str, Any] = {"type": "null"}
_NAME: dict[str, Any] = {"type": "string", "pattern": "^[a-z][a-z0-9_]{0,99}$"}
_KIND: dict[str, Any] = {"type": "object", "propertyNames": _NAME, "additionalProperties": _EXPRESSION}

FAMILY_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["family", "match"],
    "if": {"not": {"required": ["extends"]}},
    "then": {"required": ["sizes", "layers", "prefix", "tensors", "blocks"]},
    "additionalProperties": False,
    "properties": {
        "family": _NAME,
        "match": {"type": "array", "items": {"type": "string"}, "minItems": 1},
        "extends": _NAME,
        "expect": {"type": "object", "additionalProperties": {"type": "array", "minItems": 1}},
        "defaults": {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}},
        "sizes": {"type": "object", "propertyNames": _NAME, "additionalProperties": {"anyOf": [_EXPRESSION, _REMOVED]}},
        "uneven": {
            "type": "object",
            "additionalProperties": {"type": "string", "pattern": "^(refuse|repeat|whole|pad [1-9][0-9]{0,5})$"},
        },
        "layers": {
            "type": "object",
            "properties": {
                "count": _EXPRESSION,
                "mtp": {"type": "object", "required": ["count"], "additionalProperties": _EXPRESSION},
            },
            "additionalProperties": {"anyOf": [_KIND, _REMOVED]},
        },
        "prefix": {"type": "string"},
        "rename": {"type": "object", "additionalProperties": {"type": "string"}, "minProperties": 1},
        "text": {"type": "string", "pattern": r"^[a-z][a-z0-9_]*\??$"},
        "formats": {"type": "array", "items": {"enum": format_names()}, "minItems": 1},
        "undescribed": {"type": "object", "additionalProperties": {"type": "string"}},
        "stored": {"enum": ["BF16", "F16", "F32"]},
        "holes": {"type": "object", "propertyNames": _NAME, "additionalProperties": _NAME},
        "tensors": {
            "type": "object",
            "additionalProperties": {"type": "object", "additionalProperties": {"type": ["string", "null"]}},
        },
        "blocks": {
            "type": "object",
            "additionalProperties": {
                "type": ["object", "null"],
                "propertyNames": _NAME,
                "additionalProperties": {
                    "anyOf": [
                        {"type": ["string", "number", "boolean", "null"]},
                        {"type": "array", "items": {"type": "string", "pattern": "^="}, "minItems": 1},
                    ]
                },
            },
        },
    },
}
