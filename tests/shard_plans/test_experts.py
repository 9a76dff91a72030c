"""Expert placement: dealing, id ranges as text, and what a hand-edited placement must satisfy."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shard_plans.errors import PlanError
from shard_plans.placement.experts import ExpertPlacement, contiguous, format_ids, parse_ids
from shard_plans.placement.grid import make_grid


def test_first_slots_hold_one_more() -> None:
    assert [len(ids) for ids in contiguous(896, 24)] == [38] * 8 + [37] * 16
    assert contiguous(4, 3) == ((0, 1), (2,), (3,))


@given(st.integers(1, 300), st.integers(1, 40))
def test_contiguous_deals_each_expert_once(experts: int, ep: int) -> None:
    slots = contiguous(experts, ep)
    assert [expert for ids in slots for expert in ids] == list(range(experts))
    assert max(map(len, slots)) - min(map(len, slots)) <= 1


@given(st.lists(st.integers(0, 999), min_size=1, max_size=50))
def test_ids_survive_as_text(ids: list[int]) -> None:
    assert parse_ids(format_ids(ids)) == tuple(ids)


@pytest.mark.parametrize("text", ["", "a", "3-1", "0-99999999", "1,,2", "-1", "0-65537", "٣"])
def test_bad_ids(text: str) -> None:
    with pytest.raises(PlanError):
        parse_ids(text)


@given(st.text(alphabet="0123456789-, ", max_size=20))
def test_any_ids_text(text: str) -> None:
    with suppress(PlanError):
        assert all(i >= 0 for i in parse_ids(text))


def test_layers_and_replicas() -> None:
    grid = make_grid(tp=4, ep=2, etp=1)
    placement = ExpertPlacement(((0, 1), (2, 3)), {5: ((0, 1), (2, 3), (3, 1), (2, 0))})
    placement.validate(4, grid)
    assert placement.held(0, grid, 1, 0) == (0, 1) and placement.held(5, grid, 1, 1) == (2, 0)
    assert placement.replicas_differ(grid)
    assert not ExpertPlacement(((0, 1), (2, 3))).replicas_differ(grid)


@pytest.mark.parametrize(
    ("slots", "words"),
    [
        (((0, 1), (2, 4)), "names expert 4"),
        (((0, 1), (2, 2)), "expert 3 is on no ep slot"),
        (((0, 1, 2, 3),), "1 lists for ep 2"),
        (((0, 1, 2, 3), ()), "holds no expert"),
        (((0, 1), (2, 3), (0, 1), (2, 2)), "expert 3 is on no ep slot of replica edp 1"),
    ],
)
def test_placements_that_lose_experts(slots: tuple[tuple[int, ...], ...], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        ExpertPlacement(slots).validate(4, make_grid(tp=4, ep=2, etp=1))
