"""Masks against the sentence that each of their words is, key by key; and what an indexer picks of equals."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.blocks.context import single_rank
from runtime.blocks.mask import Mask
from runtime.blocks.sparse_index import Index, left, pick
from shard_plans.families.model import Model

LENGTHS = st.one_of(st.none(), st.integers(1, 9))


@given(st.integers(1, 12), st.integers(0, 12), LENGTHS, LENGTHS, st.integers(0, 9))
def test_every_pair_is_as_the_words_say(new: int, old: int, window: int | None, chunk: int | None, cut: int) -> None:
    positions, seen = torch.arange(old, old + new), torch.arange(old + new)
    generator = torch.Generator().manual_seed(old * 13 + new)
    picked = torch.rand(2, new, old + new, generator=generator) > 0.5
    behind = torch.rand(new, 3, generator=generator) > 0.5
    start = min(cut, new - 1)
    plain = Mask(positions, seen, window, chunk, behind=behind).hidden(start, new)
    heads = Mask(positions, seen, window, chunk, picked).hidden(start, new)
    assert plain.shape == (new - start, old + new + 3) and heads.shape == (2, 1, new - start, old + new)
    for row in range(start, new):
        at = old + row
        for key in range(old + new):
            sees = key <= at
            sees &= window is None or at - key < window
            sees &= chunk is None or at // chunk == key // chunk
            assert bool(plain[row - start, key]) == (not sees)
            for head in range(2):
                assert bool(heads[head, 0, row - start, key]) == (not (sees and bool(picked[head, row, key])))
        assert torch.equal(plain[row - start, old + new :], ~behind[row])


def test_of_equal_scores_the_earlier_key_is_picked_whatever_lies_behind() -> None:
    """Else a token would see other keys in a prefill than step by step."""
    ctx = single_rank(Model("", {}, {}, {}, (), {}, False), torch.float32, torch.device("cpu"))
    queries, shares = torch.ones(1, 2, 4), torch.ones(1, 2)
    keys = torch.tensor([-1.0, 2.0, -1.0, -1.0, 2.0, -1.0, -3.0, 9.0])[:, None].expand(-1, 4)
    for count in (6, 7, 8):
        seen = torch.arange(count)
        found = pick(ctx, 4, Index(queries, keys[:count], shares), keys[:count], torch.tensor([5]), seen)
        assert sorted(found[0].tolist()) == [0, 1, 2, 4]
        assert left(found, count)[0].nonzero().flatten().tolist() == [0, 1, 2, 4]
