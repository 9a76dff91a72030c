"""What the digests of documents are taken of, and how long the chunks of a tensor are."""

from __future__ import annotations

import json
import re
from typing import Any

import xxhash

CHUNK = 4 << 20
"""Bytes of a tensor that have one digest; a longer tensor's digest is that of its chunks' digests."""
DIGEST = re.compile(r"[0-9a-f]{32}")
"""An xxh3-128 in hex."""


def canonical_json(value: Any) -> bytes:
    """JSON with sorted keys, no spaces, ASCII only."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def canonical_digest(value: Any) -> str:
    """xxh3-128 of the canonical JSON, in hex."""
    return str(xxhash.xxh3_128_hexdigest(canonical_json(value)))
