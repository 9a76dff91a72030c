"""Cutting the layers into pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shard_plans.errors import GridError


def balance(
    costs: Sequence[int], stages: int, first: int = 0, last: int = 0, peaks: Sequence[int] = ()
) -> tuple[tuple[int, int], ...]:
    """Contiguous half-open layer ranges, none empty, whose most expensive stage is as cheap as possible.

    `costs` is one number a layer; `first` and `last` are added to the first and the last stage, and to every stage the
    largest of its layers' `peaks` (buffers that one layer after the other uses). Among the partitions
    with the cheapest worst stage the evenest is taken (the least sum of squares), so the result is always the same.
    Raises GridError where there are more stages than layers.
    """
    count = len(costs)
    if not 0 < stages <= count:
        raise GridError(f"pp {stages} can't cut {count} layers into stages of at least one; legal pp: 1 to {count}")
    sums = np.concatenate(([0.0], np.cumsum(np.array(costs, dtype=np.float64))))
    spans = sums[None, :] - sums[:, None]  # spans[i, j] = layers i to j-1
    for start in range(count if peaks else 0):
        spans[start, start + 1 :] += np.maximum.accumulate(np.array(peaks[start:], dtype=np.float64))
    spans[np.tril_indices(count + 1)] = np.inf
    worst = _solve(spans, stages, first, last, None)[0]
    _, choices = _solve(spans, stages, first, last, worst * (1 + 1e-12))
    ranges, stop = [], count
    for choice in reversed(choices):
        start = int(choice[stop])
        ranges.append((start, stop))
        stop = start
    return tuple(reversed(ranges))


def _solve(
    spans: np.ndarray[tuple[int, int], np.dtype[np.float64]], stages: int, first: int, last: int, limit: float | None
) -> tuple[float, list[np.ndarray[tuple[int], np.dtype[np.int64]]]]:
    """Dynamic programming over stages: the worst stage without a limit, the sum of squares under one."""
    count = len(spans) - 1
    scale = float(np.max(spans[0, 1:])) + first + last or 1.0
    best = np.full(count + 1, np.inf)
    best[0] = 0.0
    choices = []
    for stage in range(stages):
        cost = spans + (first if stage == 0 else 0) + (last if stage == stages - 1 else 0)
        if limit is None:
            total = np.maximum(best[:, None], cost)
        else:
            total = best[:, None] + np.where(cost <= limit, (cost / scale) ** 2, np.inf)
        choices.append(np.argmin(total, axis=0))
        best = total[choices[-1], np.arange(count + 1)]
    return float(best[count]), choices
