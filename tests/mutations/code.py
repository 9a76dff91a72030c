"""How a bug gets into one layer of the sharded ranks, while the reference stays right. Ranks are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from runtime.blocks import forward
from runtime.blocks.context import RankContext
from shard_plans.families.model import Layer, Model

Weights = Mapping[str, Any]


class Here(threading.local):
    """Whether this thread is in the layer of a bug."""

    wrong = False


def twist_layer(patch: pytest.MonkeyPatch, index: int, **changes: Callable[..., Any]) -> None:
    """Give the layer other `words`, another `model`, or other `weights`, as in `enter_layer`."""
    enter_layer(patch, index, **changes)


def enter_layer(
    patch: pytest.MonkeyPatch,
    index: int,
    words: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda words: words,
    model: Callable[[Model], Model] = lambda model: model,
    weights: Callable[[RankContext, Weights], Weights] = lambda ctx, weights: weights,
) -> Here:
    """Know who is in the layer, and give it there what these functions make of what it is given."""
    here, run = Here(), forward._run_layer

    def run_layer(ctx: RankContext, layer: Layer, given: Weights, *rest: Any) -> Any:
        if layer.index != index or ctx.grid.world == 1:
            return run(ctx, layer, given, *rest)
        here.wrong = True
        try:
            other = replace(layer, words=words(layer.words))
            ctx = replace(ctx, model=model(ctx.model))
            return run(ctx, other, weights(ctx, given), *rest)
        finally:
            here.wrong = False

    patch.setattr(forward, "_run_layer", run_layer)
    return here


def replace_in_layer(patch: pytest.MonkeyPatch, index: int, owner: Any, name: str, wrong: Callable[..., Any]) -> None:
    """Put `wrong(right, *arguments)` in the place of a function or method, in the layer alone."""
    here, right = enter_layer(patch, index), getattr(owner, name)

    def call(*given: Any, **named: Any) -> Any:
        return wrong(right, *given, **named) if here.wrong else right(*given, **named)

    patch.setattr(owner, name, call)
