"""Collectives against sums by hand, and what must never make them faster or slower."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shard_plans.cost.links import Group, Network, group
from shard_plans.memory.card import Link

NET = Network(Link("inside", 100e9, 1e-6), Link("between", 10e9, 5e-6), 4e-6)


@pytest.mark.parametrize(
    ("count", "stride", "cards", "nodes", "local"),
    [
        (8, 1, 8, 1, 8),
        (4, 2, 8, 1, 4),
        (16, 1, 8, 2, 8),
        (4, 8, 8, 4, 1),
        (2, 4, 8, 1, 2),
        (3, 1, 8, 2, 2),  # groups of three don't end where nodes of eight do
        (12, 1, 8, 3, 4),
        (1, 1, 8, 1, 1),
        (2, 1, 1, 2, 1),
    ],
)
def test_groups_lie_on_nodes(count: int, stride: int, cards: int, nodes: int, local: int) -> None:
    found = group(count, stride, cards)
    assert (found.ranks, found.nodes, found.local) == (count, nodes, local)


def test_inside_a_node_by_hand() -> None:
    # eight ranks: 3 steps up and 3 down, 7/8 of 8 MB twice at 100 GB/s
    assert NET.all_reduce(8e6, Group(8)) == pytest.approx(4e-6 + 6 * 1e-6 + 2 * 7e6 / 100e9)
    assert NET.all_gather(8e6, Group(8)) == pytest.approx(4e-6 + 3 * 1e-6 + 7e6 / 100e9)
    assert NET.all_reduce(8e6, Group(1)) == NET.all_gather(8e6, Group(1)) == NET.dispatch(9, 9, 2, Group(1)) == 0
    assert NET.send(1e6, False) == pytest.approx(4e-6 + 1e-6 + 1e-5)
    assert NET.send(1e6, True) == pytest.approx(4e-6 + 5e-6 + 1e-4)
    assert replace(NET, efficiency=0.5).send(1e6, True) == pytest.approx(4e-6 + 5e-6 + 2e-4)


def test_between_nodes_by_hand() -> None:
    # two nodes of four: 2 steps inside, 3/4 of 8 MB; 1 step between, half of each rank's 2 MB; both twice
    by_hand = 4e-6 + 2 * (2e-6 + 6e6 / 100e9 + 5e-6 + 1e6 / 10e9)
    assert NET.all_reduce(8e6, Group(8, 2)) == pytest.approx(by_hand)


def test_dispatch_by_hand() -> None:
    # one expert a token, four ranks in a node: 3/4 of the rows leave
    assert NET.dispatch(100, 1000, 1, Group(4)) == pytest.approx(4e-6 + 2e-6 + 100 * 1000 * 0.75 / 100e9)
    # two experts a token, two nodes of one rank: 1.5 nodes are wanted, half of them the own one
    assert NET.dispatch(100, 1000, 2, Group(2, 2)) == pytest.approx(4e-6 + 5e-6 + 100 * 1000 * 0.75 / 10e9)
    # however many experts a token has, it goes to each rank once
    assert NET.dispatch(100, 1000, 10**6, Group(4)) == pytest.approx(4e-6 + 2e-6 + 100 * 1000 * 3 / 100e9)


sizes = st.floats(0, 1e9)
groups = st.builds(lambda local, nodes: Group(local * nodes, nodes), st.integers(1, 16), st.integers(1, 64))


@given(sizes, sizes, groups, st.floats(1, 10))
def test_more_bytes_are_slower_and_better_links_never(one: float, two: float, among: Group, times: float) -> None:
    less, more = sorted((one, two))
    better = replace(
        NET,
        inside=Link("", NET.inside.bandwidth * times, NET.inside.latency / times),
        between=Link("", NET.between.bandwidth * times, NET.between.latency / times),
    )
    for name in ("all_reduce", "all_gather"):
        assert getattr(NET, name)(less, among) <= getattr(NET, name)(more, among)
        assert getattr(better, name)(more, among) <= getattr(NET, name)(more, among)
    assert NET.dispatch(less, 1, 8, among) <= NET.dispatch(more, 1, 8, among)
    assert better.dispatch(more, 1, 8, among) <= NET.dispatch(more, 1, 8, among)
