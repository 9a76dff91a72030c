"""Choosing where a bug goes: a layer and a rank that can have it, by the dice."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from runtime.opened import Opened
from shard_plans.documents.manifest import read_shard_manifest
from tests.mutations.bug import Bug, Site


def choose(bug: Bug, out: Path, opened: Opened, dice: random.Random, patch: pytest.MonkeyPatch) -> Site | None:
    """A random place in the output for the bug; None where no layer of the model can have it."""
    layers = list(opened.model.forward_layers)
    dice.shuffle(layers)
    for layer in layers:
        stages = opened.plan.stages
        stage = next(n for n, (first, stop) in enumerate(stages) if first <= layer.index < stop)
        size = opened.plan.grid.stage_ranks
        rank = stage * size + dice.randrange(size)
        site = Site(out, opened, layer, rank, shapes(opened, rank, layer.index), dice, patch)
        if bug.fits(site):
            return site
    return None


def shapes(opened: Opened, rank: int, layer: int) -> dict[str, tuple[int, ...]]:
    """What the rank holds of a layer, and of both ends: native name without the layer's prefix -> shape as stored."""
    prefix, found = f"layers.{layer}.", {}
    for file in opened.root.ranks[rank].files:
        for tensor in read_shard_manifest(opened.out, file, opened.root).tensors:
            if tensor.name.startswith(prefix) or "layers." not in tensor.name:
                found[tensor.name.removeprefix(prefix)] = tuple(tensor.shape)
    return found
