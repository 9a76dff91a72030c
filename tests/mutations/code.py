"""How a bug gets into one layer of the sharded ranks, while the reference stays right. Ranks are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from runtime.blocks import forward
from runtime.blocks.context import RankContext
from shard_plans.families.model import Layer, Model
from tests.mutations.bug import Site

Weights = Mapping[str, Any]


class Here(threading.local):
    """Whether this thread is in the layer of a bug."""

    wrong = False


def twist_layer(site: Site, **changes: Callable[..., Any]) -> None:
    """Give the layer other `words`, another `model`, or other `weights`, as in `enter_layer`."""
    enter_layer(site, **changes)


def enter_layer(
    site: Site,
    words: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda words: words,
    model: Callable[[Model], Model] = lambda model: model,
    weights: Callable[[RankContext, Weights], Weights] = lambda ctx, weights: weights,
) -> Here:
    """Know who is in the layer, and give it there what these functions make of what it is given."""
    here, run = Here(), forward._run_layer

    def run_layer(ctx: RankContext, layer: Layer, given: Weights, *rest: Any) -> Any:
        if layer.index != site.layer.index or ctx.grid.world == 1:
            return run(ctx, layer, given, *rest)
        here.wrong = True
        try:
            other = replace(layer, words=words(layer.words))
            ctx = replace(ctx, model=model(ctx.model))
            return run(ctx, other, weights(ctx, given), *rest)
        finally:
            here.wrong = False

    site.patch.setattr(forward, "_run_layer", run_layer)
    return here


def replace_in_layer(site: Site, owner: Any, name: str, wrong: Callable[..., Any]) -> None:
    """Put `wrong(right, *arguments)` in the place of a function or method, in the layer alone."""
    here, right = enter_layer(site), getattr(owner, name)

    def call(*given: Any, **named: Any) -> Any:
        return wrong(right, *given, **named) if here.wrong else right(*given, **named)

    site.patch.setattr(owner, name, call)
