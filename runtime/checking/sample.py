"""A few layers that stand for all: what --quick loads, runs and compares."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from shard_plans.families.model import Layer, Model

LEAST = 8
"""Layers that are taken at least, where there are so many."""


def sample(model: Model, seed: str) -> tuple[int, ...]:
    """Numbers of the layers to take: the first, the last, the first of every kind, and by `seed` some others.

    A stream that grows with the layers (attn_res) can't do without the ones before, so there the first ones are taken.
    """
    layers = model.forward_layers
    kinds: dict[tuple[object, ...], int] = {}
    for layer in layers:
        kinds.setdefault(_kind(layer), layer.index)
    if model.words.get("stream") == "attn_res":
        return tuple(layer.index for layer in layers[: max(LEAST, 1 + max(kinds.values()))])
    taken = {layers[0].index, layers[-1].index, *kinds.values()}
    others = [layer.index for layer in layers if layer.index not in taken]
    taken.update(random.Random(seed).sample(others, min(len(others), max(0, LEAST - len(taken)))))
    return tuple(sorted(_with_indexers(layers, taken)))


def only(model: Model, taken: Sequence[int]) -> Model:
    """The model without its other layers; those of multi-token prediction, which no pass runs, stay."""
    return replace(model, layers=tuple(layer for layer in model.layers if layer.mtp or layer.index in taken))


def _kind(layer: Layer) -> tuple[object, ...]:
    """What a layer is made of: its words, but of numbers (a window, say) only that they are there."""
    return tuple(
        sorted(
            (name, str(value) if isinstance(value, (str, bool)) else "")
            for name, value in layer.words.items() if value is not None
        )
    )  # fmt: skip


def _with_indexers(layers: Sequence[Layer], taken: set[int]) -> set[int]:
    """The same with the layers whose indexer picks what those see that have none of their own."""
    last, found = None, set(taken)
    for layer in layers:
        if "index_topk" in layer.words:
            last = layer.index
        if layer.index in taken and layer.words.get("index") == "previous" and last is not None:
            found.add(last)
    return found
