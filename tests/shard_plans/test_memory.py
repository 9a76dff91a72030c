"""The ledger: weights equal what is laid out, to the byte; the caches equal what public start-up logs print."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shard_plans.documents.plan import Plan, Workload
from shard_plans.errors import FamilyError, GridError, PlanError
from shard_plans.families.binding import Binding
from shard_plans.families.model import Layer, Model
from shard_plans.memory.cluster import parse_cluster
from shard_plans.memory.count import ledger, with_ledger
from shard_plans.memory.ledger import fits, format_ledger
from shard_plans.memory.needs import Need, arriving_rows, kv_cache, stage_need
from shard_plans.memory.payload import Payload, rank_weights
from shard_plans.placement.experts import ExpertPlacement
from shard_plans.placement.grid import Grid, make_grid
from shard_plans.placement.place import place
from tests.checkpoints.architectures import ARCHITECTURES, DEEPSEEKS
from tests.checkpoints.variants import VARIANTS
from tests.conftest import MakeCheckpoint
from tests.tools.converted import bound
from tests.tools.plans import DENSE_PLANS, MOE_PLANS, make_plan, plan_id

FAMILIES = ["llama", "qwen2", "qwen3", "mixtral", "qwen3_moe_fp8", "deepseek_v3_fp8", "deepseek_v3_mtp"]
GIB = 1 << 30


def laid_out(binding: Binding, plan: Plan) -> tuple[int, ...]:
    """Payload bytes of each rank's files by the placement itself."""
    placement = place(binding, plan)
    sizes = {file.name: file.nbytes for file in placement.files}
    return tuple(sum(sizes[name] for name in names) for _, names in placement.ranks)


@pytest.mark.parametrize("mtp", ["keep", "drop"])
@pytest.mark.parametrize("sizes", DENSE_PLANS + MOE_PLANS, ids=plan_id)
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_exact(tiny: MakeCheckpoint, family: str, sizes: dict[str, int], mtp: str) -> None:
    binding = bound(tiny(family))
    if sizes.get("ep", 1) > 1 and not binding.model.sizes.get("experts"):
        return
    plan = make_plan(binding, sizes, mtp)
    weights = rank_weights(Payload(binding), plan)
    assert weights == laid_out(binding, plan)
    assert sum(weights) >= binding.checkpoint.total_bytes - (0 if mtp == "keep" else 10**6)


@pytest.mark.parametrize("family", [name for name in VARIANTS | ARCHITECTURES | DEEPSEEKS if name not in FAMILIES])
def test_weights_are_exact_for_every_family(tiny: MakeCheckpoint, family: str) -> None:
    """Ten plans and more each; those that the family's sizes don't allow are refused by both."""
    binding, legal = bound(tiny(family)), 0
    for sizes in (*DENSE_PLANS, *MOE_PLANS, {"tp": 2, "pp": 2}, {"dp": 2}, {"dp": 2, "tp": 2}, {"pp": 2}, {"dp": 4}):
        if sizes.get("ep", 1) > 1 and not binding.model.sizes.get("experts"):
            continue
        if sizes.get("pp", 1) > len(binding.model.forward_layers):
            continue
        plan = make_plan(binding, sizes)
        try:
            wanted = laid_out(binding, plan)
        except (GridError, PlanError) as refused:
            with pytest.raises(type(refused)):
                rank_weights(Payload(binding), plan)
            continue
        assert rank_weights(Payload(binding), plan) == wanted, sizes
        legal += 1
    assert legal >= 5


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3_fp8", "deepseek_v3_mtp"])
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_weights_are_exact_for_any_placement(tiny: MakeCheckpoint, family: str, data: st.DataObject) -> None:
    """Uneven and repeated experts, replicas that differ, borders anywhere."""
    binding = bound(tiny(family))
    count, forward, kept = binding.model.sizes["experts"], len(binding.model.forward_layers), len(binding.model.layers)
    tp, dp, pp = (data.draw(st.sampled_from(options)) for options in ([1, 2, 4], [1, 2], [1, 2, 3]))
    ep = data.draw(st.sampled_from([n for n in (1, 2, 4, 8) if (dp * tp) % n == 0]))
    etp = data.draw(st.sampled_from([n for n in (1, 2, 4, 8) if (dp * tp // ep) % n == 0]))
    grid = Grid(tp, pp, dp, ep, etp)
    borders = sorted(data.draw(st.permutations(range(1, forward)))[: pp - 1])
    edges = [0, *borders, kept]

    def slots() -> tuple[tuple[int, ...], ...]:
        number = ep * data.draw(st.sampled_from([1, grid.edp]))
        dealt: list[list[int]] = [[] for _ in range(number)]
        for replica in range(number // ep):
            for expert in data.draw(st.permutations(range(count))):
                dealt[replica * ep + data.draw(st.integers(0, ep - 1))].append(expert)
        return tuple(tuple(ids) or (0, 0) for ids in dealt)

    moe = next(p.layer for p in binding.parameters if p.per_expert)
    assert moe is not None
    plan = replace(
        make_plan(binding), grid=grid, stages=tuple(pairwise(edges)),
        experts=ExpertPlacement(slots(), {moe: slots()}),
    )  # fmt: skip
    assert rank_weights(Payload(binding), plan) == laid_out(binding, plan)


def test_strict_blocks_refuse_here_too(tiny: MakeCheckpoint) -> None:
    binding = bound(tiny("deepseek_v3_fp8"))
    plan = make_plan(binding, {"tp": 4}, strict_blocks=True)
    with pytest.raises(PlanError, match="inside a quantisation block"):
        with_ledger(plan, binding)
    with pytest.raises(GridError, match="doesn't divide"):
        rank_weights(Payload(binding), replace(plan, grid=make_grid(tp=3)))


def model(layers: int, words: dict[str, object], **sizes: int) -> Model:
    """A model of equal layers with these sizes."""
    return Model("toy", {}, {}, sizes, tuple(Layer(i, {}, words) for i in range(layers)), {}, False)


def cached(model: Model, grid: Grid, workload: Workload) -> int:
    return sum(kv_cache(layer, model, grid, workload) for layer in model.layers)


@pytest.mark.parametrize(
    ("kind", "layers", "sizes", "tp", "tokens", "gib"),
    [
        ("gqa", 62, {"kv_heads": 8, "head_dim": 128}, 1, 262_144, 62.00),  # Qwen3-Coder-480B
        ("gqa", 94, {"kv_heads": 4, "head_dim": 128}, 4, 621_392, 27.85),  # Qwen3-235B
        ("gqa", 62, {"kv_heads": 8, "head_dim": 128}, 2, 196_608, 23.25),  # MiniMax-M2.7
        ("mla", 61, {"kv_lora": 512, "rope": 64}, 8, 2_454_421, 160.63),  # Kimi-K2.5: whole on every tp rank
    ],
)
def test_caches_agree_with_public_logs(
    kind: str, layers: int, sizes: dict[str, int], tp: int, tokens: int, gib: float
) -> None:
    found = cached(model(layers, {"attn": kind}, **sizes), make_grid(tp=tp), Workload(tokens, 1))
    assert found / GIB == pytest.approx(gib, abs=0.01)


def test_caches_of_repeated_heads_windows_types_and_replicas() -> None:
    gqa = model(1, {"attn": "gqa"}, kv_heads=2, head_dim=64)
    one = cached(gqa, make_grid(), Workload(90, 8))
    assert one == 2 * 2 * 64 * 96 * 8 * 2  # whole blocks of 16
    assert cached(gqa, make_grid(tp=2), Workload(90, 8)) == one // 2
    assert cached(gqa, make_grid(tp=8), Workload(90, 8)) == one // 2  # heads are repeated, not cut
    assert cached(gqa, make_grid(dp=3), Workload(90, 8)) == one * 3 // 8
    assert cached(gqa, make_grid(), Workload(90, 8, "fp32")) == 2 * one
    assert (
        cached(gqa, make_grid(), Workload(90, 8, "fp8")) == one // 2 * 68 // 64
    )  # and a scale for each token and head
    windowed = model(1, {"attn": "gqa", "window": 11}, kv_heads=2, head_dim=64)
    assert cached(windowed, make_grid(), Workload(90, 8, prefill_chunk=22)) == one // 2  # two blocks, or parts of three
    with pytest.raises(FamilyError, match="isn't known"):
        cached(model(1, {"attn": "unheard_of"}), make_grid(), Workload())
    with pytest.raises(FamilyError, match="kv_heads"):
        cached(model(1, {"attn": "gqa"}), make_grid(), Workload())


def test_rows_that_reach_an_expert_slot() -> None:
    moe = model(1, {"attn": "gqa", "ffn": "moe"}, topk=8, hidden=4)
    load = Workload(1000, 4, prefill_chunk=100)
    assert arriving_rows(moe, make_grid(), load) == 800
    assert arriving_rows(moe, make_grid(tp=8, ep=8), load) == 200  # twice the mean
    assert arriving_rows(moe, make_grid(dp=4, ep=2, etp=1), load) == 1600  # two edp replicas share the tokens


def test_what_costs_more_needs_more(tiny: MakeCheckpoint) -> None:
    binding = bound(tiny("deepseek_v3_fp8"))

    def need(grid: Grid, load: Workload) -> Need:
        return stage_need(binding.model, grid, load, grid.pp - 1, (0, 3))

    base = need(make_grid(tp=2), Workload())
    assert need(make_grid(tp=2), Workload(prefill_chunk=16384)).activations > base.activations
    assert need(make_grid(tp=2), Workload(context=16384)).kv_cache == 2 * base.kv_cache
    assert need(make_grid(), Workload()).communication == 0 < base.communication
    assert need(make_grid(tp=4), Workload()).activations < base.activations


def test_a_row_adds_up_and_prints(tiny: MakeCheckpoint) -> None:
    binding = bound(tiny("qwen3_moe_fp8"))
    plan = replace(make_plan(binding, {"tp": 2, "pp": 2}), cluster=parse_cluster("1x4:2GB"))
    rows = ledger(Payload(binding), plan)
    assert [row.stage for row in rows] == [0, 0, 1, 1] and [row.rank for row in rows] == [0, 1, 2, 3]
    for row in rows:
        assert row.total == row.weights + row.kv_cache + row.activations + row.communication + row.runtime
        assert row.headroom == 17 * 10**8 - row.total
    assert not fits(rows) and fits([replace(row, limit=row.total) for row in rows])
    assert f"{rows[0].total:,}" in format_ledger(rows) and len(format_ledger(rows).splitlines()) == 5


@pytest.mark.parametrize("load", [{"kv_dtype": "int3"}, {"context": 0}, {"concurrency": -1}, {"prefill_chunk": 2**50}])
def test_workloads_that_make_no_sense(load: dict[str, object]) -> None:
    with pytest.raises(PlanError, match=r"allowed|possible"):
        Workload(**load)  # type: ignore[arg-type]
