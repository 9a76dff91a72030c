"""What would fit: each remedy's number holds, the next one doesn't; Kimi K3's published figures come out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shard_plans.families.binding import Binding
from shard_plans.memory.cluster import parse_cluster
from shard_plans.memory.payload import Payload
from shard_plans.memory.workload import Workload
from shard_plans.placement.grid import Grid
from shard_plans.search.remedies import GIB, Remedy, cards, fewest, weights_alone
from shard_plans.search.search import explore
from shard_plans.search.space import Space
from shard_plans.search.stages import Stages, balance_within, even
from shard_plans.verbs import open_model
from tests.checkpoints.giant import CONFIGS
from tests.conftest import MakeCheckpoint
from tests.tools.converted import bound

LOAD = Workload(256, 1 << 18, prefill_chunk=64, utilization=1)


@pytest.fixture(scope="module")
def k3() -> Binding:
    return open_model(CONFIGS / "kimi-k3.json")


def space(binding: Binding, cluster: str, load: Workload | None = None) -> Space:
    return Space(binding, Payload(binding), parse_cluster(cluster), load or Workload())


def by_kind(found: tuple[Remedy, ...]) -> dict[str, Remedy]:
    return {remedy.kind: remedy for remedy in reversed(found)}  # the first of a kind wins


def test_kimi_k3_on_one_server(k3: Binding) -> None:
    found = explore(k3, parse_cluster("1x8:80GB"))
    assert found.plan.fits is False and found.prediction is None
    of_cards = [remedy for remedy in found.remedies if remedy.kind == "cards"]
    assert isinstance(of_cards[0].value, int) and of_cards[0].value >= 24
    assert space(k3, f"{of_cards[0].value // 8}x8:80GB").fits()
    assert not space(k3, f"{of_cards[0].value // 8 - 1}x8:80GB").fits()
    assert of_cards[1].value == 24
    assert "191.81 GiB a card here (tp 8 pp 1" in of_cards[1].text and "64.3 GiB" in of_cards[1].text
    assert "tp 8 pp 3" in of_cards[1].text
    weights = next(remedy for remedy in found.remedies if remedy.kind == "weights")
    assert "40 cards (5x8)" in weights.text and "70.0 GiB" in weights.text and "tp 8 pp 5" in weights.text
    kinds = by_kind(found.remedies)
    assert kinds["context"].value is None and kinds["concurrency"].value is None
    assert kinds["offload"].value and "host memory" in kinds["offload"].text


@pytest.mark.parametrize(
    ("name", "tp", "pp", "gib"),
    [
        (None, 8, 3, 64.3), (None, 8, 12, 16.5), (None, 16, 2, 51.3), (None, 32, 1, 56.6),
        ("fp8_block", 8, 3, 114.4), ("fp8_block", 16, 2, 88.5), ("fp8_block", 8, 5, 70.0),
        ("fp8_block", 8, 12, 29.5), ("bf16", 8, 8, 85.5), ("bf16", 8, 12, 57.0), ("bf16", 32, 1, 173),
    ],
)  # fmt: skip
def test_kimi_k3_in_other_formats(k3: Binding, name: str | None, tp: int, pp: int, gib: float) -> None:
    """Worst stage of the even split, weights alone, experts whole."""
    asked = space(k3, f"{tp * pp // 8}x8:80GB").weights()
    asked = asked.stored(experts=name) if name else asked
    outlines, _, _ = asked.outlines()
    outline = outlines.outline(Grid(tp, pp, 1, tp, 1))
    held = [sum(outline.costs[first:stop]) for first, stop in even(93, pp)]
    held[0] += outline.first
    held[-1] += outline.last
    assert max(held) / GIB == pytest.approx(gib, abs=0.5 if gib == 173 else 0.05)


def worst(costs: list[float], stages: Stages, first: float, last: float) -> float:
    """The most expensive stage."""
    sums = [sum(costs[start:stop]) for start, stop in stages]
    sums[0] += first
    sums[-1] += last
    return max(sums)


@pytest.mark.parametrize(("pp", "tp"), [(3, 8), (5, 8), (8, 8), (12, 8), (2, 16), (7, 4)])
def test_balanced_stages_are_no_worse_than_even_ones(k3: Binding, pp: int, tp: int) -> None:
    """Neither in bytes nor in time, whichever is balanced."""
    asked = space(k3, f"1x{pp * tp}:s5000", Workload(utilization=1.0))
    outlines, _, _ = asked.outlines()
    outline = outlines.outline(Grid(tp, pp, 1, tp, 1))
    times = [float(1 + layer % 5) for layer in range(93)]
    ends = (outline.first, outline.last)
    stages = balance_within(times, (3.0, 7.0), outline.costs, ends, [], pp, 1e15)

    for costs, first, last in ((list(map(float, outline.costs)), *ends), (times, 3.0, 7.0)):
        ours, theirs = worst(costs, stages, first, last), worst(costs, even(93, pp), first, last)
        assert ours <= theirs * (1 + 1e-9)


def test_each_number_is_the_edge(tiny: MakeCheckpoint) -> None:
    binding = bound(tiny("mixtral"))
    roomy = space(binding, "1x2:80GB", LOAD)
    half = replace(roomy.cluster, card=replace(roomy.cluster.card, memory=int(0.8 * roomy.roomiest().need)))
    asked = replace(roomy, cluster=half)
    found = explore(binding, half, workload=LOAD)
    kinds = by_kind(found.remedies)
    assert found.plan.fits is False
    for kind in ("context", "concurrency"):
        most = kinds[kind].value
        assert isinstance(most, int) and asked.under(**{kind: most}).fits()
        assert not asked.under(**{kind: most + 1}).fits()
    assert kinds["kv_dtype"].value == "fp8" and asked.under(kv_dtype="fp8").fits()
    number = kinds["cards"].value
    assert isinstance(number, int) and number > 2
    assert explore(binding, replace(half, nodes=number // 2), workload=LOAD).plan.fits
    assert not explore(binding, replace(half, nodes=number // 2 - 1), workload=LOAD).plan.fits


def test_host_memory_that_is_too_small_is_said(k3: Binding) -> None:
    cluster = parse_cluster("1x8:h100")
    poor = replace(cluster, card=replace(cluster.card, host_memory=100 * 10**9))
    said = {host.card.host_memory: by_kind(explore(k3, host).remedies)["offload"] for host in (cluster, poor)}
    assert "more than the 800 GB that the node has" in said[100 * 10**9].text and "would fit" in said[100 * 10**9].text
    assert said[100 * 10**9].value is None
    rich = said[cluster.card.host_memory]
    assert rich.value and "it fits" in rich.text and "of 2.05 TB that the node has" in rich.text


def test_the_fewest_nodes_beyond_sixteen(tiny: MakeCheckpoint) -> None:
    """Steps grow beyond 16 nodes; the numbers that they pass by are tried too."""
    asked = space(bound(tiny("llama")), "1x2:80GB", replace(LOAD, concurrency=1 << 22))
    tight = replace(asked.cluster, card=replace(asked.cluster.card, memory=asked.on(40).roomiest().need))
    found = fewest(replace(asked, cluster=tight))
    assert found is not None and 16 < found.cluster.nodes <= 40
    assert not any(replace(asked, cluster=tight).on(nodes).fits() for nodes in range(1, found.cluster.nodes))


def test_a_shared_prefix_is_no_longer_than_the_context(tiny: MakeCheckpoint) -> None:
    asked = space(bound(tiny("llama")), "1x2:80GB", replace(LOAD, prefix=200))
    assert asked.under(context=100).workload.prefix == 100 and asked.under(context=256).workload.prefix == 200
    found = explore(asked.binding, asked.cluster, workload=replace(LOAD, concurrency=16, prefix=200), goal="context")
    assert found.plan.workload.context > 200 == found.plan.workload.prefix


def test_a_cluster_that_no_number_of_cards_helps(tiny: MakeCheckpoint) -> None:
    asked = space(bound(tiny("llama")), "1x2:1MB")
    assert fewest(asked) is None
    assert cards(asked, lambda changed: changed.roomiest()).value is None
    assert weights_alone(asked).value is not None  # the tiny weights alone do fit


def test_experts_as_they_are_stored_are_no_remedy(tiny: MakeCheckpoint) -> None:
    binding = bound(tiny("llama"))
    cluster = parse_cluster("1x2:1MB")
    assert not any(remedy.kind in ("weights", "offload") for remedy in explore(binding, cluster).remedies)


def test_a_plan_that_fits_needs_no_remedy(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    assert explore(bound(tiny("llama")), parse_cluster("1x2:80GB")).remedies == ()
