"""Dimensions: the table of family_table-style products, and the law that shares put together are the whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shard_plans.errors import FamilyError, GridError
from shard_plans.families.dims import Share, divides, extent, parse_dim, take

SIZES = {"heads": 4, "kv": 2, "nope": 3, "rope": 2, "ffn": 6, "k": 2, "dk": 2, "dv": 3, "n": 2, "vocab": 10}


def runs(text: str, index: int, count: int = 2, axis: str = "tp", **uneven: str) -> list[tuple[int, int]]:
    return list(take(parse_dim(text), SIZES, uneven, {axis: Share(index, count)}).runs)


def test_whole_heads() -> None:
    assert runs("tp(heads)*(nope+rope)", 1) == [(10, 20)]


def test_halves_are_cut_part_by_part() -> None:
    assert runs("2*etp(ffn)", 0, axis="etp") == [(0, 3), (6, 9)]
    assert runs("2*etp(ffn)", 1, axis="etp") == [(3, 6), (9, 12)]


def test_interleaved_pairs_are_one_run() -> None:
    assert runs("etp(ffn)*2", 1, axis="etp") == [(6, 12)]


def test_grouped_by_key_head_differs_from_blocks() -> None:
    assert runs("tp(k)*(dk + dk + n*dv + n*dv)", 0) == [(0, 16)]
    assert runs("tp(k)*dk + tp(k)*dk + tp(k)*n*dv", 0) == [(0, 2), (4, 6), (8, 14)]


def test_unmarked_and_other_axes_stay_whole() -> None:
    assert runs("nope+rope", 1) == [(0, 5)]
    assert runs("etp(ffn)", 1) == [(0, 6)]


def test_repeat_gives_each_head_to_several_ranks() -> None:
    assert [runs("tp(kv)*dk", r, 4, kv="repeat") for r in range(4)] == [[(0, 2)], [(0, 2)], [(2, 4)], [(2, 4)]]


def test_padding_is_length_without_runs() -> None:
    taken = [take(parse_dim("tp(vocab)"), SIZES, {"vocab": "pad 4"}, {"tp": Share(r, 3)}) for r in range(3)]
    assert [(t.runs, t.length) for t in taken] == [(((0, 4),), 4), (((4, 8),), 4), (((8, 10),), 4)]
    empty = [take(parse_dim("tp(vocab)"), SIZES, {"vocab": "pad 64"}, {"tp": Share(r, 3)}) for r in range(3)]
    assert [(t.runs, t.length) for t in empty] == [(((0, 10),), 64), ((), 64), ((), 64)]
    assert runs("tp(vocab)", 1, vocab="pad 64") == [(5, 10)]  # divides already: nothing is padded


def test_what_does_not_divide_is_refused() -> None:
    with pytest.raises(GridError, match="tp 3 doesn't divide heads 4"):
        runs("tp(heads)*dk", 0, 3)
    assert not divides(4, "refuse", 3) and divides(4, "whole", 3) and not divides(3, "repeat", 4)


@pytest.mark.parametrize(
    "text",
    ["", "tp(", "2*", "dp(heads)", "a b", "2**3", "(heads", "heads)", "tp(2)", "-1", "9" * 12, "tp(heads)*(2+tp(ffn))"],
)
def test_bad_dimensions(text: str) -> None:
    with pytest.raises(FamilyError):
        extent(parse_dim(text), SIZES)


PLAIN = st.sampled_from(["2", "3", "nope", "rope", "tp(heads)", "tp(ffn)"])
PRODUCTS = st.lists(PLAIN, min_size=1, max_size=3).map("*".join)
SUMS = st.lists(PRODUCTS, min_size=2, max_size=3).map(lambda terms: f"({'+'.join(terms)})")


@given(st.lists(st.lists(PLAIN | SUMS, min_size=1, max_size=2).map("*".join), min_size=1, max_size=2).map("+".join))
def test_shares_cover_the_dimension(text: str) -> None:
    """Every index goes to a rank; runs ascend; lengths add up."""
    try:
        dim = parse_dim(text)
    except FamilyError as error:
        assert "cuts one product twice" in str(error) or "more than 100 words" in str(error)
        return
    whole, sizes = extent(dim, SIZES), SIZES
    seen = np.zeros(whole, int)
    for rank in range(2):
        taken = take(dim, sizes, {}, {"tp": Share(rank, 2)})
        flat = [index for start, stop in taken.runs for index in range(start, stop)]
        assert flat == sorted(set(flat)) and len(flat) == taken.length
        seen[flat] += 1
    assert (seen >= 1).all()


@given(st.lists(st.sampled_from(["2", "nope", "rope"]), max_size=2), st.lists(st.sampled_from(["2", "dk"]), max_size=2))
def test_one_mark_cuts_like_numpy(outer: list[str], inner: list[str]) -> None:
    """The oracle: reshape the indices to the product's factors and slice the marked axis."""
    words = [*outer, "tp(heads)", *inner]
    shape = [int(w) if w.isdigit() else SIZES[w.removeprefix("tp(").removesuffix(")")] for w in words]
    index = np.arange(np.prod(shape)).reshape(shape)
    for rank in range(2):
        part = np.split(index, 2, axis=len(outer))[rank].ravel()
        flat = [i for start, stop in runs("*".join(words), rank) for i in range(start, stop)]
        assert flat == part.tolist()
