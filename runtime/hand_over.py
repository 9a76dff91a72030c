"""From one pipeline stage to the next: the stream, and what goes beside it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.blocks import stream
from runtime.blocks.beside import Beside
from runtime.blocks.context import RankContext
from shard_plans.families.model import Model

Stages = Sequence[tuple[int, int]]
"""Half-open layer range of each stage."""


def hand_over(
    ctx: RankContext, stages: Stages, stage: int, x: Tensor | None, positions: Tensor, beside: Beside
) -> Tensor | None:
    """Move the stream x from `stage` to the next, each rank to the one in its place there: None, but on that stage.

    Picks of an indexer go with it where a layer there sees what one before it picked, and features of images where one
    there adds them.
    """
    deep = beside.tokens is not None and ctx.model.sizes.get("deepstack", 0) > stages[stage + 1][0]
    step, picks = ctx.grid.stage_ranks, picks_wanted(ctx.model, stages, stage + 1)
    if x is not None:
        ctx.comm.send(x, ctx.at.rank + step)
        if picks and beside.picked is not None:
            ctx.comm.send(beside.picked, ctx.at.rank + step)
        if deep and beside.deep is not None:
            ctx.comm.send(beside.deep, ctx.at.rank + step)
    elif ctx.at.stage == stage + 1:
        shape = stream.shape(ctx.model, len(positions), stages[stage + 1][0])
        x = ctx.comm.recv(ctx.at.rank - step, shape, ctx.compute)
        if picks:
            size = (len(positions), min(picks, int(positions[-1]) + 1))
            beside.picked = ctx.comm.recv(ctx.at.rank - step, size, torch.int64)
        if deep and beside.tokens is not None:
            beside.deep = ctx.comm.recv(ctx.at.rank - step, deep_shape(ctx.model, beside.tokens), ctx.compute)
        return x
    return None


def picks_wanted(model: Model, stages: Stages, stage: int) -> int:
    """How many keys an indexer before `stage` picked that layers there, or behind it, see; 0 where none does."""
    first = stages[stage][0]
    later = next((word for layer in model.forward_layers[first:] if (word := layer.words.get("index"))), None)
    return picks_before(model, first) if later == "previous" else 0


def picks_before(model: Model, layer: int) -> int:
    """How many keys the last indexer before `layer` picks at most."""
    topk = [earlier.words["index_topk"] for earlier in model.forward_layers[:layer] if "index_topk" in earlier.words]
    return int(topk[-1]) if topk else 0


def deep_shape(model: Model, tokens: Tensor) -> tuple[int, int, int]:
    """Shape of the features that early layers add to the `tokens` of images."""
    return model.sizes.get("deepstack", 0), len(tokens), model.sizes["hidden"]
