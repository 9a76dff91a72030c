"""Clusters and cards as users write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shard_plans.errors import ClusterError
from shard_plans.memory.cluster import known_cards, parse_card, parse_cluster


@pytest.mark.parametrize(
    ("text", "world", "memory"),
    [
        ("4x8:s5000", 32, 80 * 10**9),
        ("2x2:80GB", 4, 80 * 10**9),
        ("2x2:80GiB", 4, 80 * 2**30),
        ("1x1:79.5GiB", 1, 79 * 2**30 + 2**29),
        ("1X2:1tb", 2, 10**12),
        ("1x2:64MB", 2, 64 * 10**6),
        ("1x8:MTT S4000", 8, 48 * 10**9),
        ("1x8:NVIDIA H200", 8, 141 * 10**9),
        ("1x8:RTX 4090", 8, 24 * 10**9),
        ("1x8:Ascend 910B", 8, 64 * 10**9),
    ],
)
def test_clusters(text: str, world: int, memory: int) -> None:
    cluster = parse_cluster(text)
    assert (cluster.world, cluster.card.memory) == (world, memory)
    assert parse_cluster(cluster.text) == cluster


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4x8", "NODESxCARDS:CARD"),
        ("8:s5000", "NODESxCARDS:CARD"),
        ("4x8:", "NODESxCARDS:CARD"),
        ("0x8:s5000", "has 0 cards"),
        ("4x0:80GB", "has 0 cards"),
        ("100000x100000:80GB", "1 to 65536"),
        ("4x8:0GB", "has no memory"),
        ("4x8:0.0001KB", "has no memory"),
        ("4x8:-80GB", "unknown; known: s4000"),
        ("4x8:s9000", "unknown; known: s4000, s5000, .*80GB"),
        ("4x8:80", "unknown"),
        ("4x8:80B", "unknown"),
    ],
)
def test_what_cannot_be_read_is_refused(text: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        parse_cluster(text)


def test_every_preset_has_its_figures_and_source() -> None:
    cards = known_cards()
    wanted = {"s4000", "s5000", "a100-40", "a100-80", "a800", "h100", "h20", "h200", "b200", "b300", "mi300x", "mi355x"}
    assert wanted | {"910b", "rtx-4090", "l40s"} == set(cards)
    for name, card in cards.items():
        assert parse_card(name.upper()) == card
        assert 10 * 10**9 < card.memory < 10**12 and card.bandwidth and card.source[-7:-3].startswith("20")


@given(st.text(max_size=20))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        assert parse_cluster("2x2:" + text).card.memory > 0
    except ClusterError as error:
        assert len(str(error)) < 500
