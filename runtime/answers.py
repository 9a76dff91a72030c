"""Answers of one rank: caches of the prompts, their prefill and generation, and the pass that checks them."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from torch import Tensor

from runtime.blocks.images import Images
from runtime.blocks.places import beside_images, shift
from runtime.checking.cached import Compared, RouteLog, compare_cached
from runtime.comm.devices import synchronize
from runtime.generate import Answer, Generation
from runtime.kv_options import KvOptions
from runtime.passes import RankRun
from runtime.timeline import Speed, Timeline


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """What is to be answered."""

    prompts: Sequence[Tensor]
    """Token ids [tokens] of each, on the device."""
    new_tokens: int
    ends: AbstractSet[int]
    """Ids behind which an answer ends."""
    cache: KvOptions
    images: Images | None = None
    """Of the only prompt."""


@dataclass(frozen=True, slots=True)
class Answered:
    """What came of it; the same on every rank, but for the bytes."""

    tokens: tuple[tuple[int, ...], ...]
    """What was generated behind each prompt."""
    compared: Compared
    """With one pass without the cache."""
    bytes: int
    """The most that this rank's caches held."""
    speed: Speed


def answer(run: RankRun, wanted: Wanted) -> Answered:
    """Answer all prompts at once; every rank of the plan calls it."""
    prompts, moved, log = wanted.prompts, 0, RouteLog()
    if wanted.images is not None:
        moved = shift(beside_images(run.ctx.model, prompts[0], wanted.images))
    pools = wanted.cache.pools(run.layers, [len(ids) for ids in prompts], wanted.new_tokens)
    answers = [Answer(ids, run.new_caches(pools), moved) for ids in prompts]
    generation = Generation(run, answers, log, wanted.images)
    clock = Timeline(run.ctx.at.rank)
    generation.prefill(wanted.cache.chunk)
    synchronize(run.ctx.device)
    filled = clock.now()
    generation.generate(wanted.new_tokens, wanted.ends)
    synchronize(run.ctx.device)
    made = [len(answer.tokens) - 1 for answer in answers]
    speed = Speed(filled, clock.now() - filled, max(made), sum(made))
    compared = compare_cached(generation, log, wanted.cache.lossless(run.ctx.compute))
    return Answered(tuple(tuple(answer.tokens) for answer in answers), compared, generation.most, speed)
