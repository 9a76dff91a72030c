"""A config.json that has no weights beside it: the file, or the folder that holds it alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import xxhash

from shard_plans.checkpoints.checkpoint import INDEX, parse_object, read_small
from shard_plans.errors import CheckpointError

CONFIG = "config.json"


def config_alone(path: Path) -> Path | None:
    """The config.json that `path` is or holds, where that is all there is; None where weights or their index lie there.

    Raises CheckpointError where there is nothing.
    """
    if path.is_dir():
        names = os.listdir(path)
        weights = any(name == INDEX or name.endswith(".safetensors") for name in names)
        return path / CONFIG if CONFIG in names and not weights else None
    if not path.exists():
        raise CheckpointError(f"{path} doesn't exist; give a checkpoint's folder or a config.json")
    return path if path.name != INDEX else None


def read_config(path: Path) -> tuple[dict[str, Any], str]:
    """The object in a config.json, and the xxh3-128 of its bytes in hex; CheckpointError where it isn't one."""
    raw = read_small(path.parent, path.name)
    config = parse_object(raw, path)
    if not isinstance(config.get("model_type"), str):
        raise CheckpointError(f"{path} isn't a model's config.json: it states no model_type in words")
    return config, xxhash.xxh3_128_hexdigest(raw)
