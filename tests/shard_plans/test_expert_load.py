"""Load files of every shape, and experts dealt by load: complete, even, copies apart."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shard_plans.documents.plan import format_plan, parse_plan
from shard_plans.documents.plan_check import check_plan
from shard_plans.errors import PlanError
from shard_plans.memory.cluster import parse_cluster
from shard_plans.memory.workload import Workload
from shard_plans.placement.experts import contiguous
from shard_plans.placement.grid import make_grid
from shard_plans.search.dealt import Dealer
from shard_plans.search.expert_load import ExpertLoad, read_load
from shard_plans.search.place_experts import deal, imbalance, replicate
from shard_plans.search.search import explore
from tests.conftest import MakeCheckpoint
from tests.shard_plans.test_memory import laid_out
from tests.tools.converted import bound

LOAD = Workload(64, 16, prefill_chunk=64)


def test_the_hottest_gets_the_copies() -> None:
    assert replicate([10, 1, 1, 1], 3, 4) == [4, 1, 1, 1]
    assert replicate([6, 6, 1], 2, 4) == [2, 2, 1]
    assert replicate([4, 3, 2, 1], 0, 4) == [1, 1, 1, 1]
    assert replicate([100, 3, 1], 3, 2) == [2, 2, 2] == replicate([100, 3, 1], 9, 2)  # a second one on a slot is no use


def test_dealt_by_hand() -> None:
    assert deal([5, 4, 3, 2], 2, 0) == ((0, 3), (1, 2))  # 7 and 7
    assert deal([8, 1, 1, 1, 1], 2, 1) == ((0, 1, 3), (0, 2, 4))  # both halves of 0, apart
    assert imbalance([5, 4, 3, 2], ((0, 3), (1, 2))) == 1.0
    assert imbalance([5, 4, 3, 2], ((0, 1), (2, 3))) == pytest.approx(9 / 7)
    assert deal([1, 1, 1], 2, 0) == ((0, 2), (1,))  # the first slot holds one more


def test_it_is_as_even_as_can_be() -> None:
    """Against every placement of six experts on three slots of two."""
    counts = [9, 7, 6, 5, 3, 1]
    every = (
        tuple(tuple(e for e in range(6) if at[e] == slot) for slot in range(3))
        for at in product(range(3), repeat=6)
        if all(at.count(slot) == 2 for slot in range(3))
    )
    best = min(imbalance(counts, slots) for slots in every)
    assert imbalance(counts, deal(counts, 3, 0)) == pytest.approx(best)


@given(
    st.lists(st.floats(0, 1e6), min_size=4, max_size=40).filter(any),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.integers(0, 8),
)
def test_every_expert_is_held_and_slots_are_equal(counts: list[float], each: int, nodes: int, extra: int) -> None:
    slots = deal(counts, each * nodes, extra, nodes)
    assert len(slots) == each * nodes
    assert set().union(*slots) == set(range(len(counts)))
    sizes = [len(ids) for ids in slots]
    held = len(counts) + min(extra, (each * nodes - 1) * len(counts))
    assert sum(sizes) == held and max(sizes) - min(sizes) <= 1
    assert 1 - 1e-9 <= imbalance(counts, slots) <= len(slots) + 1e-9


@given(st.lists(st.integers(1, 1000), min_size=16, max_size=16))
def test_copies_help_and_load_beats_order(counts: list[int]) -> None:
    """A bound of list scheduling: the busiest slot has at most the mean and one heaviest item more."""
    plain, copied = deal(counts, 4, 0), deal(counts, 4, 4)
    mean = sum(counts) / 4
    assert imbalance(counts, plain) * mean <= mean + max(counts)
    heaviest = max(count / n for count, n in zip(counts, replicate(counts, 4, 4), strict=True))
    assert imbalance(counts, copied) * mean <= mean + heaviest


def test_no_slot_holds_an_expert_twice_for_the_asking() -> None:
    dealer = Dealer(8, ExpertLoad({0: (100.0, *[1.0] * 7)}), parse_cluster("1x4:80GB"), redundant=8)
    assert dealer.dealt(make_grid(dp=4, ep=1)).extra == 0  # each rank has all
    two = dealer.dealt(make_grid(dp=4, ep=2))
    assert two.extra == 8 and two.placement.layers[0] == (tuple(range(8)),) * 2


def test_nodes_are_even_too() -> None:
    counts = [100.0, 90, 80, 70, *[1.0] * 12]
    slots = deal(counts, 4, 0, nodes=2)
    left = sum(counts[expert] for ids in slots[:2] for expert in ids)
    assert left == pytest.approx(sum(counts) / 2, rel=0.05)
    dealer = Dealer(16, ExpertLoad({0: tuple(counts)}), parse_cluster("2x2:80GB"))
    assert dealer.dealt(make_grid(dp=4, ep=4)).placement.layers[0] == slots


def test_files_of_every_form(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    binding = bound(tiny("deepseek_v3_mtp"))
    moe = sorted({p.layer for p in binding.parameters if p.per_expert and p.layer is not None})
    run = [layer for layer in moe if not binding.model.layers[layer].mtp]
    rows = [[(layer * 7 + expert) % 5 for expert in range(16)] for layer in run]
    wanted = ExpertLoad({layer: tuple(map(float, row)) for layer, row in zip(run, rows, strict=True)})
    forms = {
        "a.json": json.dumps(rows),
        "b.json": json.dumps(dict(zip(run, rows, strict=True))),
        "c.json": json.dumps({"layers": dict(zip(run, rows, strict=True))}),
        "d.csv": "layer,expert,count\n"
        + "".join(f"{layer},{e},{n}\n" for layer, row in zip(run, rows, strict=True) for e, n in enumerate(row)),
    }
    for name, text in forms.items():
        (tmp_path / name).write_text(text)
        assert read_load(tmp_path / name, binding) == wanted


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("l.json", "{", "isn't JSON"),
        ("l.json", "3", "neither an object of layers nor a list"),
        ("l.json", "[[1, 2]]", "lists 1 layers, the model has 2 with experts"),
        ("l.json", '{"1": [1, 2]}', "layer 1 has 2 counts, the model has 16 experts"),
        ("l.json", '{"0": [1]}', "layer 0 has no experts; layers that have: 1 to 3"),
        ("l.json", '{"x": [1]}', "'x' isn't a layer's number"),
        ("l.json", '{"1": 3}', "layer 1 holds 3, a list of counts is wanted"),
        ("l.json", json.dumps({"1": [-1, *[1] * 15]}), "layer 1, expert 0: -1 isn't a count"),
        ("l.json", json.dumps({"1": [True, *[1] * 15]}), "expert 0: True isn't a count"),
        ("l.json", '{"1": [NaN' + ", 1" * 15 + "]}", "expert 0: 'NaN' isn't a count"),
        ("l.json", json.dumps({"1": [0] * 16}), "all counts of layer 1 are 0"),
        ("l.json", "{}", "holds no layer"),
        ("l.json", "[" * 100_000, "isn't JSON"),
        ("l.csv", "a,b\n", "header layer,expert,count is wanted"),
        ("l.csv", "layer,expert,count\n1,0,x\n", "line 2: '1,0,x' isn't layer,expert,count"),
        ("l.csv", "layer,expert,count\n1,16,1\n", "line 2: expert 16; the model has 0 to 15"),
        ("l.csv", "layer,expert,count\n1,0,1\n1,0,1\n", "line 3: expert 0 of layer 1 was counted before"),
        ("l.csv", "layer,expert,count\n1,0,1\n", "layer 1 has 1 counts"),
        ("none.json", None, "can't be read|isn't there|No such file"),
    ],
)
def test_files_of_the_wrong_shape(
    tiny: MakeCheckpoint, tmp_path: Path, name: str, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(PlanError, match=message):
        read_load(tmp_path / name, bound(tiny("deepseek_v3_mtp")))


def test_a_dense_model_has_no_load(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    (tmp_path / "l.json").write_text("[]")
    with pytest.raises(PlanError, match="has no experts"):
        read_load(tmp_path / "l.json", bound(tiny("llama")))


def test_a_plan_by_load_is_whole_counted_and_written(tiny: MakeCheckpoint) -> None:
    binding = bound(tiny("deepseek_v3_mtp"))
    hot = ExpertLoad({1: (1000.0, *[1.0] * 15), 2: tuple(float(n) for n in range(16))})
    sizes = {"tp": 2, "dp": 2, "pp": 1, "ep": 4, "etp": 1}
    cluster = parse_cluster("2x2:h100")
    even = explore(binding, cluster, sizes, LOAD)
    for redundant in (0, 4):
        found = explore(binding, cluster, sizes, LOAD, expert_load=hot, redundant=redundant)
        plan = found.plan
        check_plan(plan, binding)
        assert plan.ledger is not None and tuple(row.weights for row in plan.ledger) == laid_out(binding, plan)
        again = parse_plan(format_plan(plan))
        assert again.experts == plan.experts and set(plan.experts.layers) == {1, 2}
        assert plan.experts.default == contiguous(16, 4)
        copies = sum(len(ids) for ids in plan.experts.layers[1]) - 16
        assert copies == redundant == found.dealt.extra if found.dealt else False
        assert even.plan.ledger is not None
        grown = sum(row.weights for row in plan.ledger) - sum(row.weights for row in even.plan.ledger)
        assert (grown > 0) == (redundant > 0)  # the memory of the copies is counted
    auto = explore(binding, cluster, sizes, LOAD, expert_load=hot)
    assert auto.dealt is not None and auto.dealt.imbalance < Dealer(16, hot, cluster).contiguous(make_grid(2, 1, 2, 4))
    assert auto.prediction is not None and found.prediction is not None
    tight = replace(cluster, card=replace(cluster.card, memory=10**6))
    assert explore(binding, tight, sizes, LOAD, expert_load=hot).plan.fits is False
