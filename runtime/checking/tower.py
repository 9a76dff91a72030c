"""The vision tower step by step: each with what the reference's step before it made, and what comes of the images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from runtime.blocks import towers
from runtime.blocks.beside import Beside
from runtime.blocks.context import RankContext
from runtime.blocks.images import Images
from runtime.blocks.weights import LayerWeights
from runtime.checking.checks import COSINE, Measure, exact, limits
from runtime.checking.compare import cosine, layer_error, operator_error

PLACES, DEEP, PLACED = -1, 1000, 1001
"""Order of what lies before the tower's steps and behind them."""
WRONG = 1.0
"""The error of what isn't there at all, or of another shape; its cosine is the negative."""


@dataclass(frozen=True, slots=True)
class TowerRecorder:
    """Keeps what the steps of a tower made."""

    steps: dict[str, Tensor]

    def made(self, step: str, x: Tensor) -> Tensor:
        """Keep it."""
        self.steps[step] = x
        return x


class Follower:
    """Compares what each step made with the reference's, and goes on with that."""

    def __init__(self, steps: Mapping[str, Tensor], exact: bool) -> None:
        """`steps`: what the reference's made, in their order; `exact`: relative errors are measured, else cosines."""
        self._steps, self._exact = steps, exact
        self.found: dict[str, tuple[float, int]] = {}
        """Step -> worst relative error of a row (or cosine of all), and the row."""

    def made(self, step: str, x: Tensor) -> Tensor:
        """Compare it."""
        theirs = self._steps.get(step)
        if theirs is None or theirs.shape != x.shape:
            self.found[step] = (WRONG if self._exact else -WRONG, 0)
            return x if theirs is None else theirs.to(x.dtype)
        self.found[step] = operator_error(x, theirs) if self._exact else (cosine(x, theirs), 0)
        return theirs.to(x.dtype)


def passes(measure: Measure, compute: torch.dtype) -> bool:
    """Whether it is within the limit of the type."""
    return measure.value <= limits(compute)[0] if exact(compute) else measure.value >= COSINE


def tower_measures(
    ctx: RankContext, weights: LayerWeights, images: Images, steps: Mapping[str, Tensor]
) -> Iterator[Measure]:
    """Look at all `images` again; a measure for each step, a step that is left out or isn't the reference's included.

    Images that are dealt to ranks otherwise are all looked at here: whether what ranks hand round lies as it should,
    only the end says.
    """
    follower, lost = Follower(steps, exact(ctx.compute)), (_wrong(ctx.compute), 0)
    towers.look(replace(ctx, deals_images=False), weights, images, follower)
    for order, step in enumerate(dict.fromkeys([*steps, *follower.found])):
        value, row = follower.found.get(step, lost)
        where = f"the tower's {step}, rank {ctx.at.rank}"
        if step not in follower.found or step not in steps:
            where += ", not run" if step in steps else ", the reference has none"
        elif exact(ctx.compute):
            where += f", row {row}"
        yield Measure("vision", value, where, order)


def _wrong(compute: torch.dtype) -> float:
    """The measure of what isn't there at all."""
    return WRONG if exact(compute) else -WRONG


def placed_measure(ctx: RankContext, tokens: Tensor, x: Tensor, stream: Tensor) -> Measure:
    """What lies in the places of the images' `tokens` in x, and in the reference's stream."""
    where, ours, theirs = f"the images' tokens, rank {ctx.at.rank}", x[tokens], stream[tokens]
    if not exact(ctx.compute):
        return Measure("vision", cosine(ours, theirs), where, PLACED)
    error, row = layer_error(torch.zeros_like(theirs), ours, theirs)
    return _behind(ctx, Measure("vision", error, f"{where}, token {int(tokens[row])}", PLACED))


def deep_measure(ctx: RankContext, where: str, deep: Tensor | None, theirs: Tensor) -> Measure:
    """What early layers will add to the images' tokens; both [layers, tokens, hidden]."""
    if deep is None or deep.shape != theirs.shape:
        return Measure("vision", _wrong(ctx.compute), f"{where}, not those of the images", DEEP)
    if not exact(ctx.compute):
        return Measure("vision", cosine(deep, theirs), where, DEEP)
    error, row = operator_error(deep.flatten(0, 1), theirs.flatten(0, 1))
    where = f"{where}, for layer {row // deep.shape[1]}, row {row % deep.shape[1]}"
    return _behind(ctx, Measure("vision", error, where, DEEP))


def _behind(ctx: RankContext, measure: Measure) -> Measure:
    """What is behind the tower: where it fails, and is named, no step of this rank's tower did."""
    if passes(measure, ctx.compute):
        return measure
    dealt = "how images are dealt to ranks, " if ctx.deals_images else ""
    words = f"{measure.where}: each step of the tower is right, but not {dealt}what is made of its result"
    return replace(measure, where=words)


def places_measure(ctx: RankContext, ours: Beside, theirs: Beside) -> Measure | None:
    """Frames, rows and columns of the tokens, and which of these stand for images; None where they are alike."""
    for what, mine, right in (("places", ours.places, theirs.places), ("placeholders", ours.tokens, theirs.tokens)):
        if mine is None and right is None:
            continue
        where = f"{what} of tokens, rank {ctx.at.rank}"
        if mine is None or right is None or mine.shape != right.shape:
            return Measure("vision", _wrong(ctx.compute), where, PLACES)
        apart = (mine != right).reshape(-1, mine.shape[-1]).any(0).nonzero().flatten().tolist()
        if apart:
            words = f"{where}, token {apart[0]} of {mine.shape[-1]}: {mine[..., apart[0]].tolist()}, "
            words += f"the reference has {right[..., apart[0]].tolist()}"
            return Measure("vision", _wrong(ctx.compute), words, PLACES)
    return None
