"""From one pipeline stage to the next: the stream, and what goes beside it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.blocks import stream
from runtime.blocks.context import RankContext
from runtime.blocks.piece import Piece, tokens_of
from shard_plans.families.model import Model

Stages = Sequence[tuple[int, int]]
"""Half-open layer range of each stage."""


def hand_over(ctx: RankContext, stages: Stages, stage: int, x: Tensor | None, pieces: Sequence[Piece]) -> Tensor | None:
    """Move the stream x from `stage` to the next, each rank to the one in its place there: None, but on that stage.

    Picks of an indexer go with it where a layer there sees what one before it picked, and features of images where one
    there adds them.
    """
    first, back = stages[stage + 1][0], ctx.at.rank - ctx.grid.stage_ranks
    picks, adds = picks_wanted(ctx.model, stages, stage + 1), ctx.model.sizes.get("deepstack", 0) > first
    if x is not None:
        ctx.comm.send(x, ctx.at.rank + ctx.grid.stage_ranks)
        for beside in (piece.beside for piece in pieces):
            for more in (beside.picked if picks else None, beside.deep if adds else None):
                if more is not None:
                    ctx.comm.send(more, ctx.at.rank + ctx.grid.stage_ranks)
        return None
    if ctx.at.stage != stage + 1:
        return None
    reached = max((layer.index + 1 for layer in ctx.model.forward_layers if layer.index < first), default=0)
    x = ctx.comm.recv(back, stream.shape(ctx.model, tokens_of(pieces), reached), ctx.compute)
    for piece in pieces:
        positions, beside = piece.positions, piece.beside
        if picks:
            size = (len(positions), min(picks, int(positions[-1]) + 1))
            beside.picked = ctx.comm.recv(back, size, torch.int64)
        if adds and beside.tokens is not None:
            beside.deep = ctx.comm.recv(back, deep_shape(ctx.model, beside.tokens), ctx.compute)
    return x


def picks_wanted(model: Model, stages: Stages, stage: int) -> int:
    """How many keys an indexer before `stage` picked that layers there, or behind it, see; 0 where none does."""
    first = stages[stage][0]
    later = (layer.words.get("index") for layer in model.forward_layers if layer.index >= first)
    following = next(filter(None, later), None)
    return picks_before(model, first) if following == "previous" else 0


def picks_before(model: Model, layer: int) -> int:
    """How many keys the last indexer before `layer` picks at most."""
    before = (earlier.words for earlier in model.forward_layers if earlier.index < layer)
    topk = [words["index_topk"] for words in before if "index_topk" in words]
    return int(topk[-1]) if topk else 0


def deep_shape(model: Model, tokens: Tensor) -> tuple[int, int, int]:
    """Shape of the features that early layers add to the `tokens` of images."""
    return model.sizes.get("deepstack", 0), len(tokens), model.sizes["hidden"]
