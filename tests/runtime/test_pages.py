"""Blocks of the cache: however sequences come, grow, slide and go, no two own the same block."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.blocks.cache import LayerCache
from runtime.blocks.pages import Allocator, Pool
from shard_plans.errors import RuntimeFault

LIMIT = 12
STEPS = st.lists(st.tuples(st.integers(0, 3), st.one_of(st.none(), st.integers(1, 9))), max_size=40)
"""(sequence, how many tokens it grows by; None: it ends)."""


@given(STEPS, st.sampled_from([None, 1, 4, 7]))
def test_blocks_never_alias(steps: list[tuple[int, int | None]], window: int | None) -> None:
    pool = Pool(4, LIMIT)
    caches = [LayerCache(pool) for _ in range(4)]
    kept: list[list[float]] = [[] for _ in caches]
    for number, (sequence, grow) in enumerate(steps):
        cache, tokens = caches[sequence], kept[sequence]
        if grow is None:
            cache.free()
            tokens.clear()
            continue
        new = [number + token / 16 for token in range(grow)]
        positions = torch.arange(len(tokens), len(tokens) + grow)
        try:
            seen, (found,) = cache.append(positions, [torch.tensor(new)[:, None]], window)
        except RuntimeFault as fault:
            assert "more blocks are needed" in str(fault) and cache.length == len(tokens)
            break
        tokens += new
        assert found[:, 0].tolist() == [tokens[position] for position in seen.tolist()]
        assert seen[-1] == len(tokens) - 1 and (window is not None or len(seen) == len(tokens))
        owned = [block for each in caches for block in each.table]
        assert len(owned) == len(set(owned)) == pool.allocator.held <= LIMIT
    for cache in caches:
        cache.free()
    assert pool.allocator.held == 0 and len(set(pool.allocator.take(LIMIT))) == LIMIT


@given(st.lists(st.integers(-5, 5), max_size=40))
def test_the_allocator_hands_out_what_is_free(counts: list[int]) -> None:
    allocator, held = Allocator(LIMIT), list[int]()
    for count in counts:
        if count < 0:
            allocator.give_back([held.pop() for _ in range(min(-count, len(held)))])
        elif count <= LIMIT - len(held):
            held += allocator.take(count)
        else:
            with pytest.raises(RuntimeFault, match=f"{LIMIT - len(held)} of {LIMIT} are free"):
                allocator.take(count)
        assert len(set(held)) == len(held) == allocator.held and all(0 <= block < LIMIT for block in held)


def test_a_block_is_given_back_once() -> None:
    allocator = Allocator()
    (block,) = allocator.take(1)
    allocator.give_back([block])
    with pytest.raises(RuntimeFault, match=f"block {block} was given back"):
        allocator.give_back([block])


def test_an_aliased_block_changes_what_is_read() -> None:
    """The check above can fail: a table that names another sequence's block."""
    pool = Pool(4)
    one, two = LayerCache(pool), LayerCache(pool)
    one.append(torch.arange(4), [torch.ones(4, 1)])
    two.append(torch.arange(4), [torch.zeros(4, 1)])
    two.table[0] = one.table[0]
    _, (found,) = two.append(torch.tensor([4]), [torch.zeros(1, 1)])
    assert found[:, 0].tolist() == [1, 1, 1, 1, 0]
