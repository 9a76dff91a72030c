"""The JSON schema of the root manifest."""

from __future__ import annotations

from typing import Any

import jsonschema

from shard_plans.documents.digests import DIGEST
from shard_plans.documents.shard_manifest import LARGEST, PLAIN_NAME, VERSION

ROOT_FORMAT = "reshard"
RANK_KEYS = ("rank", "stage", "dp", "tp", "edp", "ep", "etp")
SOURCE_NAME = r"(?!\.{1,2}\Z)[^/\\:\x00-\x1f\x7f]{1,255}"
"""Names of a stranger's files: anything that stays in the folder."""


def schema_error(value: Any) -> str | None:
    """What is wrong with the root manifest `value`, and at which key; None where nothing is."""
    error = next(iter(_Validator(SCHEMA).iter_errors(value)), None)
    if error is None:
        return None
    where = ".".join(str(step) for step in error.absolute_path) or "the document"
    return f"{where}: {error.message[:200]}"


def _object(**fields: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(fields), "additionalProperties": False, "properties": fields}


def _list(item: Any) -> dict[str, Any]:
    return {"type": "array", "items": item}


def _word(pattern: str) -> dict[str, Any]:
    return {"type": "string", "pattern": rf"\A{pattern}\Z"}


_SIZE = {"type": "integer", "minimum": 0, "exclusiveMaximum": LARGEST}
_HEX = _word(DIGEST.pattern)
_NAME = _word(PLAIN_NAME.pattern)
_SPAN = {"type": "array", "items": _SIZE, "minItems": 2, "maxItems": 2}
_TEXT = {"type": "string", "minLength": 1, "maxLength": 1000}
SCHEMA = _object(
    format={"const": ROOT_FORMAT},
    version={"const": VERSION},
    family=_NAME,
    plan=_HEX,
    source=_object(
        fingerprint=_HEX,
        tensors=_SIZE,
        bytes=_SIZE,
        files=_list(_object(name=_word(SOURCE_NAME), size=_SIZE, header=_HEX)),
    ),
    carried=_list(_object(name=_word(SOURCE_NAME), size=_SIZE, xxh3=_HEX)),
    ranks=_list(_object(**dict.fromkeys(RANK_KEYS, _SIZE), files=_list(_NAME))),
    files=_list(_object(name=_NAME, manifest=_NAME, size=_SIZE, xxh3=_HEX)),
    documents=_list(_object(name=_word(rf"(source/(headers/)?)?{SOURCE_NAME}"), size=_SIZE, xxh3=_HEX)),
    skipped=_list(_object(pattern=_TEXT, count=_SIZE, bytes=_SIZE, reason=_TEXT)),
    digest=_HEX,
)
_CONSTANT = _object(pattern=_TEXT, region=_list(_SPAN), reason=_TEXT)
_CONSTANT["properties"] |= {"values": {**_list(_SIZE), "minItems": 1, "maxItems": 16}}
# Only where they say something, so that all other outputs stay what version 1 first was.
SCHEMA["properties"] |= {
    "constants": {**_list(_CONSTANT), "minItems": 1},
    "layout": _word(r"[a-z][a-z0-9.@-]{0,40}"),
    "via": {**_list(_object(plan=_HEX, manifest=_HEX)), "minItems": 1},
    "partial": _word(r"[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*"),
}
_Validator = jsonschema.validators.extend(  # type: ignore[no-untyped-call]
    jsonschema.Draft202012Validator,
    # JSON Schema counts 1.0 as an integer, and Python doesn't
    type_checker=jsonschema.Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, item: type(item) is int),
)
