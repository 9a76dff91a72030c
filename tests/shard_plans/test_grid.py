"""The grid of ranks against the rank lists that Megatron and the engines use."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shard_plans.errors import GridError
from shard_plans.placement.grid import Grid, make_grid

SIZE = st.sampled_from([1, 2, 3, 4])


def test_engine_spellings() -> None:
    assert make_grid(tp=8, ep=8) == Grid(8, 1, 1, 8, 1)  # vLLM: TP 8 with expert parallel
    assert make_grid(tp=8, dp=4, ep=4) == Grid(8, 1, 4, 4, 8)  # TP 8, EP 4 on 32 cards
    assert make_grid(tp=4) == Grid(4, 1, 1, 1, 4)


def test_folding_by_hand() -> None:
    grid = make_grid(tp=2, dp=2, ep=2, etp=1)
    assert grid.edp == 2
    at = grid.coordinate(3)
    assert (at.stage, at.dp, at.tp, at.edp, at.ep, at.etp) == (0, 1, 1, 1, 1, 0)
    assert grid.tp_group(at) == (2, 3)
    assert grid.ep_group(at) == (2, 3)
    assert make_grid(tp=4, ep=2, etp=2).ep_group(make_grid(tp=4, ep=2, etp=2).coordinate(1)) == (1, 3)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"tp": 4, "ep": 3}, "legal ep: 1, 2, 4"),
        ({"tp": 4, "ep": 2, "etp": 4}, "legal etp with ep 2: 1, 2"),
        ({"tp": 0}, "tp is 0"),
        ({"tp": 10**12, "ep": 7}, "tp is 1000000000000; parallel sizes are 1 to 65536"),
        ({"tp": 512, "dp": 512}, "makes 262144 ranks"),
    ],
)
def test_sizes_that_do_not_fit(sizes: dict[str, int], words: str) -> None:
    with pytest.raises(GridError, match=words):
        make_grid(**sizes)


@given(SIZE, SIZE, SIZE, SIZE, SIZE)
def test_groups_partition_a_stage(pp: int, edp: int, ep: int, etp: int, dp: int) -> None:
    """Each kind of group splits every stage into disjoint groups that agree among their members."""
    if (edp * ep * etp) % dp:
        return
    grid = Grid(edp * ep * etp // dp, pp, dp, ep, etp)
    assert grid.world == pp * edp * ep * etp and grid.edp == edp
    for group in (grid.tp_group, grid.ep_group, grid.etp_group):
        groups = {group(at) for at in grid.coordinates()}
        assert sorted(rank for members in groups for rank in members) == list(range(grid.world))
        for at in grid.coordinates():
            members = group(at)
            assert at.rank in members and all(group(grid.coordinate(rank)) == members for rank in members)
    for at in grid.coordinates():
        assert grid.ep_group(at)[at.ep] == at.rank and grid.etp_group(at)[at.etp] == at.rank
        assert grid.tp_group(at)[at.tp] == at.rank
