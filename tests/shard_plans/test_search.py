"""The search: stages as even as can be, sizes kept, legal plans alone; the roomiest is found."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shard_plans.documents.plan import Workload, format_plan
from shard_plans.documents.plan_check import check_plan
from shard_plans.errors import GridError, PlanError
from shard_plans.memory.cluster import parse_cluster
from shard_plans.memory.payload import Payload
from shard_plans.placement.experts import ExpertPlacement, contiguous
from shard_plans.placement.grid import Grid, make_grid
from shard_plans.placement.place import place
from shard_plans.search.search import make_plan, search
from shard_plans.search.space import Space
from shard_plans.search.stages import balance
from tests.conftest import MakeCheckpoint
from tests.shard_plans.test_memory import laid_out
from tests.tools.converted import bound

SMALL = Workload(64, 4, prefill_chunk=64)


def worst(costs: list[int], edges: tuple[int, ...], first: int, last: int, peaks: list[int]) -> int:
    sums = [sum(costs[a:b]) + max(peaks[a:b], default=0) for a, b in pairwise(edges)]
    sums[0] += first
    sums[-1] += last
    return max(sums)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000)), min_size=1, max_size=8),
    st.integers(1, 8),
    st.integers(0, 500),
    st.integers(0, 500),
    st.booleans(),
)
def test_no_partition_has_a_cheaper_worst_stage(
    layers: list[tuple[int, int]], stages: int, first: int, last: int, peaked: bool
) -> None:
    costs, peaks = [cost for cost, _ in layers], [peak for _, peak in layers] if peaked else []
    if stages > len(costs):
        with pytest.raises(GridError, match="legal pp: 1 to"):
            balance(costs, stages, first, last, peaks)
        return
    found = balance(costs, stages, first, last, peaks)
    edges = (*(start for start, _ in found), found[-1][1])
    assert edges[0] == 0 and edges[-1] == len(costs) and all(a < b for a, b in found)
    every = combinations(range(1, len(costs)), stages - 1)
    best = min(worst(costs, (0, *cut, len(costs)), first, last, peaks) for cut in every)
    assert worst(costs, edges, first, last, peaks) == best


def test_equal_layers_are_dealt_evenly() -> None:
    assert [stop - start for start, stop in balance([10] * 61, 8)].count(8) == 5
    assert balance([10**12] * 4, 2, 0, 0) == ((0, 2), (2, 4))
    assert balance([1, 1, 1, 1], 2, 2, 0) == ((0, 1), (1, 4))
    assert balance([1] * 4, 4) == ((0, 1), (1, 2), (2, 3), (3, 4))


@pytest.mark.parametrize("family", ["llama", "qwen2", "mixtral", "deepseek_v3_fp8", "deepseek_v3_mtp"])
def test_the_plan_is_legal_and_exact_and_the_roomiest_is_found(tiny: MakeCheckpoint, family: str) -> None:
    binding = bound(tiny(family))
    plan = search(binding, parse_cluster("2x4:80GB"), workload=SMALL)
    assert plan.fits and plan.grid.world == 8 and plan.ledger is not None
    check_plan(plan, binding)
    assert tuple(row.weights for row in plan.ledger) == laid_out(binding, plan)
    assert format_plan(plan) == format_plan(search(binding, parse_cluster("2x4:80GB"), workload=SMALL))
    roomiest = Space(binding, Payload(binding), parse_cluster("2x4:80GB"), SMALL).roomiest()
    need = roomiest.need
    assert need <= max(row.total for row in plan.ledger)
    for tp in (1, 2, 4):
        for pp in (1, 2):
            other = search(binding, parse_cluster("2x4:80GB"), {"tp": tp, "pp": pp}, SMALL)
            assert other.ledger is not None and (other.grid.tp, other.grid.pp) == (tp, pp)
            assert max(row.total for row in other.ledger) >= need


def test_the_roomiest_is_that_of_all_grids_one_by_one(tiny: MakeCheckpoint) -> None:
    binding = bound(tiny("mixtral"))
    cluster = parse_cluster("1x4:80GB")
    needs = []
    for tp, pp in ((1, 1), (1, 2), (2, 1), (2, 2), (4, 1)):
        dp = 4 // tp // pp
        for ep in (1, 2, 4):
            for etp in (1, 2, 4):
                if (dp * tp) % (ep * etp) == 0:
                    plan = make_plan(binding, Grid(tp, pp, dp, ep, etp), workload=SMALL, cluster=cluster)
                    assert plan.ledger is not None
                    needs.append(max(row.total for row in plan.ledger))
    assert Space(binding, Payload(binding), cluster, SMALL).roomiest().need == min(needs)


def test_sizes_given_are_kept_and_illegal_ones_named(tiny: MakeCheckpoint) -> None:
    binding = bound(tiny("deepseek_v3_fp8"))
    cluster = parse_cluster("2x4:80GB")
    plan = search(binding, cluster, {"tp": 2, "pp": 2, "dp": 2, "ep": 4, "etp": 1}, SMALL)
    assert plan.grid == Grid(2, 2, 2, 4, 1) and place(binding, plan)
    assert search(binding, cluster, {"tp": 8}, SMALL).grid.tp == 8  # over two nodes, because the user says so
    assert search(binding, cluster, {}, SMALL).grid.tp <= 4
    for sizes, message in (
        ({"tp": 3}, r"tp 3 doesn't divide heads 8.*legal tp: 1, 2, 4, 8"),
        ({"pp": 4}, r"pp 4 is more than the model's 3 layers; legal pp: 1 to 3"),
        ({"pp": 3}, r"pp 3: tp x pp x dp must make the 8 cards.*divisors are 1, 2, 4, 8"),
        ({"tp": 2, "pp": 1, "dp": 2}, r"must make the 8 cards"),
        ({"tp": 2, "ep": 16}, r"legal ep with the others: 1, 2, 4, 8"),
        ({"ep": 17}, r"ep 17 is more than the model's 16 experts"),
        ({"etp": 3}, r"etp 3 doesn't divide expert_ffn 32"),
        ({"tp": 0}, r"start at 1"),
        ({"dp": -2}, r"start at 1"),
    ):
        with pytest.raises(GridError, match=message):
            search(binding, cluster, sizes, SMALL)
    with pytest.raises(GridError, match="dense models take ep 1 only"):
        search(bound(tiny("llama")), cluster, {"ep": 2}, SMALL)
    assert search(bound(tiny("llama")), cluster, {"tp": 2, "etp": 1}, SMALL).grid.etp == 1


def test_what_does_not_fit_is_the_closest_and_marked(tiny: MakeCheckpoint) -> None:
    plan = search(bound(tiny("llama")), parse_cluster("1x2:1MB"), workload=SMALL)
    assert plan.fits is False and "fits: false" in format_plan(plan)


def test_strict_blocks_leave_the_plans_that_cut_none(tiny: MakeCheckpoint) -> None:
    binding = bound(tiny("deepseek_v3_fp8"))
    plan = search(binding, parse_cluster("1x4:80GB"), workload=SMALL, strict_blocks=True)
    assert place(binding, plan)
    with pytest.raises(PlanError, match="inside a quantisation block"):
        search(binding, parse_cluster("1x4:80GB"), {"tp": 4, "etp": 4}, SMALL, strict_blocks=True)


def test_a_plan_and_a_checkpoint_belong_together(tiny: MakeCheckpoint, own_tiny: MakeCheckpoint) -> None:
    binding = bound(tiny("deepseek_v3_mtp"))
    plan = make_plan(binding, make_grid(tp=2, pp=3, ep=2))
    check_plan(plan, binding)
    assert plan.stages[-1][1] == 4 and make_plan(binding, make_grid(), mtp="drop").stages == ((0, 3),)
    other: Path = own_tiny("deepseek_v3_mtp")
    (other / "config.json").write_text((other / "config.json").read_text() + "\n")
    with pytest.raises(PlanError, match=f"{plan.checkpoint.fingerprint}.*{bound(other).checkpoint.fingerprint}"):
        check_plan(plan, bound(other))
    dense = contiguous(16, 2)
    for change, message in (
        ({"stages": ((0, 1), (1, 2), (2, 3))}, "keeps 4 layers .of which 1 for multi-token"),
        ({"stages": ((0, 1), (1, 3), (3, 4))}, "every stage must hold one of the 3 layers"),
        ({"stages": ((0, 1), (2, 3), (3, 4))}, "follow one another"),
        ({"stages": ((0, 4),)}, "aren't 3 layer ranges"),
        ({"experts": ExpertPlacement()}, "has 16"),
        ({"experts": ExpertPlacement(contiguous(15, 2))}, "expert 15 is on no ep slot"),
        ({"experts": ExpertPlacement(dense, {0: dense})}, "layer 0, which has no experts"),
        ({"checkpoint": replace(plan.checkpoint, family="llama")}, "family llama"),
    ):
        with pytest.raises(PlanError, match=message):
            check_plan(replace(plan, **change), binding)
    llama = bound(tiny("llama"))
    with pytest.raises(PlanError, match="has none"):
        check_plan(replace(make_plan(llama, make_grid()), experts=ExpertPlacement(((0,),))), llama)


@pytest.mark.parametrize("family", ["llama", "mixtral", "deepseek_v3_mtp"])
def test_bounds_are_below_and_what_fits_is_found(tiny: MakeCheckpoint, family: str) -> None:
    """No grid needs less than its bound says, and something fits exactly from the roomiest grid's bytes on."""
    binding = bound(tiny(family))
    space = Space(binding, Payload(binding), parse_cluster("2x4:80GB"), replace(SMALL, utilization=1.0))
    outlines, found, _ = space.outlines()
    needs = [outlines.candidate(grid, outline).need for grid, outline in found]
    assert all(outlines.least(*item) <= need for item, need in zip(found, needs, strict=True))
    for memory in (min(needs) - 1, min(needs)):
        cluster = replace(space.cluster, card=replace(space.cluster.card, memory=memory))
        assert replace(space, cluster=cluster).fits() is (memory == min(needs))
    assert space.plainest().grid.pp == 1 and space.together() > 0
