"""How far a workload can be stretched until nothing fits any more, found by halving."""

from __future__ import annotations

from collections.abc import Callable

from shard_plans.memory.limits import longest_context as model_limit
from shard_plans.search.space import Space

LONGEST = 1 << 24
"""Tokens of a context that are tried, where config.json states no limit."""


def context_limit(space: Space) -> int:
    """Tokens that are tried at most: what the model was made for."""
    return min(model_limit(space.binding.model) or LONGEST, LONGEST)


def longest_context(space: Space) -> Space:
    """The space whose context is the longest that fits at its concurrency; itself where not one token fits."""
    longest = most(lambda tokens: space.under(context=tokens).fits(), context_limit(space))
    return space if longest == 0 else space.under(context=longest)


def highest_concurrency(space: Space, limit: int = 1 << 20) -> int:
    """The most sequences of the workload's context that fit; 0 where not one does."""
    return most(lambda sequences: space.under(concurrency=sequences).fits(), limit)


def most(holds: Callable[[int], bool], limit: int) -> int:
    """The largest number up to `limit` for which `holds`, which must fail for all numbers beyond one; 0 for none."""
    if not holds(1):
        return 0
    if holds(limit):
        return limit
    low = 1
    while low * 2 < limit and holds(low * 2):
        low *= 2
    high = min(low * 2, limit)
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low
