"""Tables of cosines and sines that engines keep, by what config.json says of positions."""

from __future__ import annotations

from typing import Any

import pytest

from shard_plans.errors import ConfigError
from shard_plans.families.model import Layer, Model
from shard_plans.memory.caches import kept
from shard_plans.memory.rotary import rotary_tables
from shard_plans.memory.vision import patches
from shard_plans.memory.workload import Workload
from shard_plans.placement.grid import make_grid


def model(text: dict[str, Any], words: dict[str, Any], **sizes: int) -> Model:
    return Model("toy", text, text, sizes, (Layer(0, {}, words),), {}, False)


YARN = {"type": "yarn", "original_max_position_embeddings": 4096, "factor": 40}


@pytest.mark.parametrize(
    ("text", "words", "numbers"),
    [
        ({"max_position_embeddings": 8192}, {"attn": "gqa", "rope": "half"}, 8192 * 128),
        ({"max_position_embeddings": 8192}, {"attn": "gqa", "rope": "half", "rope_part": 0.25}, 8192 * 32),
        ({"max_position_embeddings": 8192}, {"attn": "gqa", "rope": "none"}, 0),
        ({"max_position_embeddings": 8192, "rope_scaling": YARN}, {"attn": "mla", "rope": "interleaved"}, 163_840 * 64),
        ({"max_position_embeddings": 8192, "rope_scaling": ["yarn"]}, {"attn": "gqa", "rope": "half"}, 8192 * 128),
        ({"max_position_embeddings": "many"}, {"attn": "gqa", "rope": "half"}, 0),
        (
            {"max_position_embeddings": 8192, "rope_scaling": {**YARN, "factor": 1e300}},
            {"attn": "gqa", "rope": "half"},
            8192 * 128,
        ),
        ({"max_position_embeddings": 8192}, {"attn": "gqa", "rope": "half", "rope_part": float("nan")}, 0),
    ],
)
def test_tables(text: dict[str, Any], words: dict[str, Any], numbers: int) -> None:
    assert rotary_tables(model(text, words, head_dim=128, rope=64)) == numbers


@pytest.mark.parametrize("window", [-5, 0.5, 1e30, float("inf"), float("nan")])
def test_windows_that_count_no_tokens(window: float) -> None:
    toy = model({}, {"attn": "gqa", "window": window}, kv_heads=1, head_dim=8)
    with pytest.raises(ConfigError, match="window"):
        kept(toy.layers[0], toy, make_grid(), Workload())


def test_patches_of_a_token() -> None:
    assert patches(model({}, {}, hidden=8, merge=9)) == 9
    assert patches(model({}, {}, hidden=8, merged=32)) == 4 == patches(model({}, {}, hidden=8))
