"""Clusters and cards as users write them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shard_plans.errors import ClusterError
from shard_plans.memory.card import Link, known_cards, with_speeds
from shard_plans.memory.cluster import parse_card, parse_cluster


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
        ("1x8:4090", 8, 24 * 10**9),
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
        ("4x8:999999999999TB", "at most 1152921504606846976"),
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
        assert 10 * 10**9 < card.memory < 10**12 and card.bandwidth and card.flops["bf16"]
        assert card.link and card.network
        assert {"memory", "bandwidth", "bf16", "link", "network"} <= set(card.sources)
        assert all(source[-7:-3].startswith("20") for source in card.sources.values())


@given(st.text(max_size=20))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        assert parse_cluster("2x2:" + text).card.memory > 0
    except ClusterError as error:
        assert len(str(error)) < 500


def test_speeds_of_a_sized_card_are_assumed_and_said_to_be() -> None:
    sized = with_speeds(parse_card("80GB"))
    assert sized.memory == 80 * 10**9 and sized.bandwidth and sized.link and sized.network and sized.flops["bf16"]
    assert all("assumed" in sized.sources[figure] for figure in ("bandwidth", "bf16", "link", "network"))
    h100 = parse_card("h100")
    assert with_speeds(h100) == h100  # nothing is lacking


@pytest.fixture
def mine(tmp_path: Path) -> Callable[..., Path]:
    def write(**changes: str | None) -> Path:
        lines = {"reshard_cluster": "1", "nodes": "2", "cards": "4", "card": "h100", **changes}
        path = tmp_path / "mine.yaml"
        path.write_text("".join(f"{key}: {value}\n" for key, value in lines.items() if value is not None))
        return path

    return write


def test_a_file_changes_a_preset_or_makes_a_card(mine: Callable[..., Path]) -> None:
    cluster = parse_cluster(str(mine(memory="94GB", network="{name: RoCE, bandwidth: 25}", host_memory="1TB")))
    card, preset = cluster.card, parse_card("h100")
    assert (cluster.world, card.memory, card.bandwidth) == (8, 94 * 10**9, preset.bandwidth)
    assert card.network == Link("RoCE", 25e9, preset.network.latency if preset.network else 0)
    assert card.host_memory == 10**12 // 4 and card.sources["network"] == "cluster file mine.yaml"
    own = parse_cluster(str(mine(card="x1", memory="64GiB", tflops="{bf16: 200}", link="{bandwidth: 90, latency: 2}")))
    assert own.card.memory == 64 << 30 and own.card.flops == {"bf16": 200e12}
    assert own.card.link == Link("link", 90e9, 2e-6) and own.card.network is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory": "0GB"}, "line 5: memory is '0GB'; give a size"),
        ({"memory": "999999999TB"}, "line 5: memory is '999999999TB'; give a size"),
        ({"bandwidth": "1e-300"}, "line 5: bandwidth"),
        ({"link": "{bandwidth: 0}"}, "line 5: link"),
        ({"card": "x1"}, "line 4: card 'x1' is unknown and the file gives no memory"),
        ({"nodes": "0"}, "line 2: nodes"),
        ({"cards": "65536", "nodes": "65536"}, "1 to 65536 can be planned for"),
        ({"bandwidth": "-3"}, "line 5: bandwidth"),
        ({"memroy": "80GB"}, "unknown key 'memroy'"),
        ({"nodes": None}, "nodes"),
        ({"tflops": "{int4: 3}"}, "unknown key 'int4'"),
    ],
)
def test_a_file_that_makes_no_sense(mine: Callable[..., Path], changes: dict[str, str | None], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        parse_cluster(str(mine(**changes)))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"none.yaml"):
        parse_cluster(str(tmp_path / "none.yaml"))
