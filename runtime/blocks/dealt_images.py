"""A data-parallel vision tower: each tp rank looks at some of the images, and all hand round what they saw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from runtime.blocks.context import RankContext
from runtime.blocks.images import Grid3, Images, token_count

Seen = tuple[Tensor, Tensor | None]
"""Tokens [tokens, hidden], and [layers, tokens, hidden] where the tower has features for early layers."""


def deal(grids: Sequence[Grid3], ranks: int) -> list[list[int]]:
    """Which images each rank looks at, ascending: the largest first, each to whoever has the fewest patches so far."""
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for number in sorted(range(len(grids)), key=lambda number: (-prod(grids[number]), number)):
        rank = loads.index(min(loads))
        dealt[rank].append(number)
        loads[rank] += prod(grids[number])
    return [sorted(numbers) for numbers in dealt]


def take(images: Images, numbers: Sequence[int]) -> Images:
    """These of the images."""
    ends = list(accumulate((prod(grid) for grid in images.grids), initial=0))
    pixels = [images.pixels[ends[number] : ends[number + 1]] for number in numbers]
    return Images(torch.cat(pixels), tuple(images.grids[number] for number in numbers))


def look_in_parallel(ctx: RankContext, images: Images, merge: tuple[int, int], look: Callable[[Images], Seen]) -> Seen:
    """What `look` makes of all images, in their order, where each tp rank looks at its own.

    A rank that has none, because there are fewer images than ranks, looks at the smallest and hands nothing round:
    the tower's weights are read all the same.
    """
    dealt = deal(images.grids, ctx.grid.tp)
    mine = dealt[ctx.at.tp]
    smallest = min(range(len(images.grids)), key=lambda number: prod(images.grids[number]))
    x, deep = look(take(images, mine or [smallest]))
    if not mine:
        x, deep = x[:0], None if deep is None else deep[:, :0]
    counts = [token_count((grid,), merge) for grid in images.grids]
    order = _order(dealt, counts, x.device)
    group = ctx.grid.tp_group(ctx.at)
    tokens = torch.cat(ctx.comm.all_gather(x.contiguous(), group))[order]
    if deep is None:
        return tokens, None
    rows = torch.cat(ctx.comm.all_gather(deep.transpose(0, 1).contiguous(), group))[order]
    return tokens, rows.transpose(0, 1)


def _order(dealt: Sequence[Sequence[int]], counts: Sequence[int], device: torch.device) -> Tensor:
    """Where each token of the images, in their order, lies among those of rank after rank."""
    where: dict[int, int] = {}
    end = 0
    for number in (number for numbers in dealt for number in numbers):
        where[number], end = end, end + counts[number]
    places = [place for number, count in enumerate(counts) for place in range(where[number], where[number] + count)]
    return torch.tensor(places, device=device)
