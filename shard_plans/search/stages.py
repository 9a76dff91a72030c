"""Cutting the layers into pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shard_plans.errors import GridError

Stages = tuple[tuple[int, int], ...]
"""Half-open ranges of layers, one a stage."""
_Spans = np.ndarray[tuple[int, int], np.dtype[np.float64]]


def balance(
    costs: Sequence[float],
    stages: int,
    first: float = 0,
    last: float = 0,
    peaks: Sequence[float] = (),
    allowed: np.ndarray[Any, np.dtype[np.bool_]] | None = None,
) -> Stages:
    """Contiguous half-open layer ranges, none empty, whose most expensive stage is as cheap as possible.

    `costs` is one number a layer; `first` and `last` are added to the first and the last stage, and to every stage the
    largest of its layers' `peaks` (buffers that one layer after the other uses). Among the partitions
    with the cheapest worst stage the evenest is taken (the least sum of squares), so the result is always the same.
    `allowed` [stages, layers + 1, layers + 1] says which ranges a stage may hold; one partition at least must be.
    Raises GridError where there are more stages than layers.
    """
    spans = _spans(costs, stages, peaks)
    worst = _solve(spans, stages, first, last, None, allowed)[0]
    _, choices = _solve(spans, stages, first, last, worst * (1 + 1e-12), allowed)
    ranges, stop = [], len(costs)
    for choice in reversed(choices):
        start = int(choice[stop])
        ranges.append((start, stop))
        stop = start
    return tuple(reversed(ranges))


def balance_within(
    times: Sequence[float],
    time_ends: tuple[float, float],
    costs: Sequence[float],
    cost_ends: tuple[float, float],
    peaks: Sequence[float],
    stages: int,
    budget: float,
) -> Stages:
    """Stages balanced by time among those whose bytes are in bounds.

    Bytes are in bounds up to those of the even split's fullest stage where these are within `budget`, else up to the
    budget, else, where nothing is within it, up to the least that is possible. So the result is never worse than the
    even split, neither in bytes nor in time, wherever the even split fits.
    """
    spans = _spans(costs, stages, peaks)
    bound = _worst(spans, even(len(costs), stages), *cost_ends)
    if bound > budget:
        least = _solve(spans, stages, *cost_ends, None, None)[0]
        bound = max(budget, least)
    bound *= 1 + 1e-12
    allowed = np.repeat((spans <= bound)[None], stages, axis=0)
    allowed[0] &= spans + cost_ends[0] + (cost_ends[1] if stages == 1 else 0) <= bound
    allowed[-1] &= spans + cost_ends[1] + (cost_ends[0] if stages == 1 else 0) <= bound
    return balance(times, stages, *time_ends, (), allowed)


def even(layers: int, stages: int) -> Stages:
    """As even by number as can be: the first stages hold one more."""
    base, more = divmod(layers, stages)
    starts = [stage * base + min(stage, more) for stage in range(stages + 1)]
    return tuple((starts[stage], starts[stage + 1]) for stage in range(stages))


def _worst(spans: _Spans, stages: Stages, first: float, last: float) -> float:
    found = [float(spans[start, stop]) for start, stop in stages]
    found[0] += first
    found[-1] += last
    return max(found)


def _spans(costs: Sequence[float], stages: int, peaks: Sequence[float]) -> _Spans:
    """[i, j]: what layers i to j-1 cost together; infinite where there are none."""
    count = len(costs)
    if not 0 < stages <= count:
        raise GridError(f"pp {stages} can't cut {count} layers into stages of at least one; legal pp: 1 to {count}")
    sums = np.concatenate(([0.0], np.cumsum(np.array(costs, dtype=np.float64))))
    spans: _Spans = sums[None, :] - sums[:, None]
    for start in range(count if len(peaks) else 0):
        spans[start, start + 1 :] += np.maximum.accumulate(np.array(peaks[start:], dtype=np.float64))
    spans[np.tril_indices(count + 1)] = np.inf
    return spans


def _solve(
    spans: _Spans,
    stages: int,
    first: float,
    last: float,
    limit: float | None,
    allowed: np.ndarray[Any, np.dtype[np.bool_]] | None,
) -> tuple[float, list[np.ndarray[tuple[int], np.dtype[np.int64]]]]:
    """Dynamic programming over stages: the worst stage without a limit, the sum of squares under one."""
    count = len(spans) - 1
    scale = float(np.max(spans[0, 1:])) + first + last or 1.0
    best = np.full(count + 1, np.inf)
    best[0] = 0.0
    choices = []
    for stage in range(stages):
        cost = spans + (first if stage == 0 else 0) + (last if stage == stages - 1 else 0)
        if allowed is not None:
            cost[~allowed[stage]] = np.inf
        if limit is None:
            total = np.maximum(best[:, None], cost)
        else:
            total = best[:, None] + np.where(cost <= limit, (cost / scale) ** 2, np.inf)
        choices.append(np.argmin(total, axis=0))
        best = total[choices[-1], np.arange(count + 1)]
    return float(best[count]), choices
