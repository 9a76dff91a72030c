"""Predicted time against sums by hand, and what must never make a plan slower."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shard_plans.cost.assumptions import Assumptions
from shard_plans.cost.links import Network
from shard_plans.cost.model import CostModel, Load, Time, Times, cost_model
from shard_plans.cost.prediction import bounds, predict
from shard_plans.cost.work import Attention, LayerWork, Matrices, Work, attention
from shard_plans.documents.plan import Workload
from shard_plans.families.binding import Binding
from shard_plans.families.model import Layer
from shard_plans.memory.card import Card, Link
from shard_plans.memory.cluster import Cluster
from shard_plans.placement.grid import Grid, make_grid
from shard_plans.search.stages import even
from shard_plans.verbs import open_model
from tests.checkpoints.giant import CONFIGS
from tests.conftest import MakeCheckpoint
from tests.shard_plans.test_memory import model
from tests.tools.converted import bound

PERFECT = Assumptions(memory=1, compute=1, links=1, kernel=0, elementwise=0, passes=0, routing=0, spread=0)
FREE = Link("free", 1e30, 0)


def card(bandwidth: float = 1e12, bf16: float = 1e14, link: Link = FREE, network: Link = FREE) -> Card:
    return Card("made", 80 * 10**9, bandwidth, "", {"bf16": bf16, "fp8": 2 * bf16}, link, network)


def made(binding: Binding, cards: int = 8, nodes: int = 1, **speeds: Any) -> CostModel:
    """A model without any cost that a test doesn't name."""
    found = card(**speeds)
    assert found.link is not None and found.network is not None
    cluster = Cluster(nodes, cards, found)
    return CostModel(Work(binding), cluster, found, Network(found.link, found.network, 0.0), PERFECT)


def test_a_product_takes_the_longer_of_reading_and_multiplying(tiny: MakeCheckpoint) -> None:
    cost = made(bound(tiny("llama")))
    weights = Matrices(10**9, 2e9, "bf16", 1)
    assert cost.products(weights, 1) == pytest.approx(2e9 / 1e12)
    assert cost.products(weights, 10_000) == pytest.approx(2 * 10**9 * 10_000 / 1e14)
    assert cost.products(replace(weights, rate="fp8"), 10_000) == pytest.approx(10**9 * 10_000 / 1e14)
    assert cost.products(replace(weights, rate="fp4"), 10_000) == pytest.approx(
        2 * 10**9 * 10_000 / 1e14
    )  # no such rate
    slow = replace(cost, assumptions=replace(PERFECT, kernel=1.0))
    assert slow.products(replace(weights, kernels=3), 1) == 3.0
    assert slow.products(replace(weights, kernels=3, rate="fp8"), 1) == 6.0


def test_a_dense_layer_by_hand(tiny: MakeCheckpoint) -> None:
    """llama: hidden 64, 8 heads and 4 KV heads of 8, ffn 96 or whatever the tiny one has, all read from its sizes."""
    binding = bound(tiny("llama"))
    sizes, cost = binding.model.sizes, made(binding)
    layer = binding.model.layers[0]
    heads, kv, dim, hidden, ffn = (sizes[name] for name in ("heads", "kv_heads", "head_dim", "hidden", "ffn"))
    values = hidden * dim * (2 * heads + 2 * kv) + 3 * hidden * ffn
    wide = {"F32": 4, "BF16": 2}[binding.parameters[1].parts[0].dtype]
    cache = 123_456
    found = cost.layer(cost.work.kind(0, 1, 1), layer, make_grid(), Load(1, 1, 500, 1.0, True), cache)
    assert found.links == 0
    assert found.total == pytest.approx((values * wide + cache) / 1e12)  # one token: everything is read once
    many = Load(10**7, 10**7, 500, 0.0, False)
    found = cost.layer(cost.work.kind(0, 1, 1), layer, make_grid(), many, cache)
    assert found.total == pytest.approx(10**7 * (2 * values + 500 * 4 * heads * dim) / 1e14)  # all is multiplied


@pytest.mark.parametrize(
    ("words", "sizes", "prefill", "decode", "token"),
    [
        ({"attn": "gqa"}, {"heads": 8, "head_dim": 16}, 4 * 8 * 16, 4 * 8 * 16, 0),
        (
            {"attn": "mla"},
            {"heads": 4, "nope": 8, "rope": 4, "v_dim": 8, "kv_lora": 32},
            2 * 4 * (8 + 4 + 8),
            2 * 4 * (32 + 4 + 32),
            0,
        ),
        ({"attn": "kda"}, {"kda_heads": 4, "kda_dim": 16}, 0, 0, 7 * 4 * 16 * 16),
    ],
)
def test_attention(words: dict[str, str], sizes: Mapping[str, int], prefill: int, decode: int, token: int) -> None:
    toy = model(1, dict(words), **sizes)
    assert attention(toy.layers[0], toy, 1) == Attention(prefill, decode, token)
    wide = Attention(10, 20, index_pair=3, picked=50)
    assert wide.flops(30, True) == 30 * 20 + 30 * 3 and wide.flops(200, False) == 50 * 10 + 200 * 3
    packed = Attention(10, 20, window=8, every=4)
    assert packed.flops(100, True) == (8 + 25) * 20
    half = attention(toy.layers[0], toy, 2)
    assert (half.prefill_pair, half.decode_pair, half.token) == (prefill / 2, decode / 2, token / 2)


def test_a_window_bounds_what_is_seen(tiny: MakeCheckpoint) -> None:
    cost = made(bound(tiny("llama")), bandwidth=1e30)
    layer, grid = Layer(0, {}, {}), make_grid()

    def seconds(visible: float, window: int | None) -> float:
        work = LayerWork((), None, Attention(100, 100, window=window))
        return cost.layer(work, layer, grid, Load(10, 10, visible, 0, False), 0).total

    assert seconds(50, None) == pytest.approx(10 * 50 * 100 / 1e14)
    assert seconds(5000, 50) == pytest.approx(seconds(50, None))


def test_experts_that_are_read_and_rows_that_arrive(tiny: MakeCheckpoint) -> None:
    binding = bound(tiny("mixtral"))
    count, topk = binding.model.sizes["experts"], binding.model.sizes["topk"]
    cost = made(binding)
    expert = Matrices(1000, 1e9, "bf16", 2)
    work = LayerWork((), expert, Attention())
    layer = binding.model.layers[0]

    def seconds(grid: Grid, tokens: float, imbalance: float = 1.0) -> float:
        return cost.layer(work, layer, grid, Load(tokens, tokens * grid.dp, 0, 0, True), 0, imbalance).total

    assert seconds(make_grid(), 1) == pytest.approx(topk * 1e9 / 1e12)  # one token reads its own experts
    assert seconds(make_grid(), 10**6) == pytest.approx(count * 1e9 / 1e12, rel=1e-3)  # many read all
    assert seconds(make_grid(tp=2, ep=2), 10**6) == pytest.approx(count / 2 * 1e9 / 1e12, rel=1e-3)
    compute = replace(cost, card=card(bandwidth=1e30))
    rows = compute.layer(work, layer, make_grid(), Load(600, 600, 0, 0, True), 0).total
    assert rows == pytest.approx(2 * 1000 * 600 * topk / 1e14)
    assert compute.layer(work, layer, make_grid(), Load(600, 600, 0, 0, True), 0, 1.5).total == pytest.approx(
        1.5 * rows
    )


def flat(step: float, layers: int, micro: int) -> Times:
    each = (Time(step),) * layers
    return Times(each, each, (Time(), Time()), (Time(), Time()), micro)


def test_a_pipeline_by_hand(tiny: MakeCheckpoint) -> None:
    cost = made(bound(tiny("llama")), cards=4)
    load = Workload(context=1000, concurrency=4, prefill_chunk=100)
    found = predict(cost, flat(0.5, 8, 4), make_grid(pp=4), even(8, 4), load)
    assert found.decode_step == pytest.approx(4.0) and found.decode_tokens == pytest.approx(1.0)
    assert found.bubble == pytest.approx(0.0)
    assert found.prefill_step == pytest.approx(1.0) and found.prefill_tokens == pytest.approx(100.0)
    assert found.first_token == pytest.approx(4.0 + 9 * 1.0)  # ten chunks, one behind the other
    alone = predict(cost, flat(0.5, 8, 1), make_grid(pp=4), even(8, 4), replace(load, concurrency=1))
    assert alone.decode_step == pytest.approx(4.0) and alone.bubble == pytest.approx(0.75)
    uneven = predict(cost, flat(0.5, 8, 4), make_grid(pp=4), ((0, 5), (5, 6), (6, 7), (7, 8)), load)
    assert uneven.decode_step == pytest.approx(4 * 2.5)
    low = bounds(flat(0.5, 8, 4), make_grid(pp=4))
    assert (low.decode_step, low.prefill_step, low.first_token) == (4.0, 1.0, 4.0)


GRIDS = [
    Grid(), Grid(tp=2, etp=2), Grid(tp=4, ep=4), Grid(pp=3), Grid(dp=8, ep=8), Grid(tp=2, pp=2, dp=2, ep=4),
    Grid(tp=2, dp=4, ep=2, etp=2), Grid(tp=8, ep=2),
]  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "mixtral", "deepseek_v3_fp8"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(grid=st.sampled_from(GRIDS), what=st.sampled_from(["bandwidth", "flops", "link", "network"]), data=st.data())
def test_more_of_anything_is_never_slower(
    tiny: MakeCheckpoint, family: str, grid: Grid, what: str, data: st.DataObject
) -> None:
    binding = bound(tiny(family))
    if not binding.model.sizes.get("experts"):
        grid = make_grid(grid.tp, grid.pp, grid.dp)
    base = card(1e12, 1e14, Link("l", 1e11, 1e-6), Link("n", 1e10, 5e-6))
    times = data.draw(st.floats(1, 100))
    choices: dict[str, dict[str, Any]] = {
        "bandwidth": {"bandwidth": 1e12 * times},
        "flops": {"flops": {name: rate * times for name, rate in base.flops.items()}},
        "link": {"link": Link("l", 1e11 * times, 1e-6 / times)},
        "network": {"network": Link("n", 1e10 * times, 5e-6 / times)},
    }
    better = choices[what]
    load = Workload(data.draw(st.integers(1, 4096)), data.draw(st.integers(1, 64)), prefill_chunk=512)
    stages = even(len(binding.model.forward_layers), grid.pp)
    found = []
    for made_card in (base, replace(base, **better)):
        cost = cost_model(binding, Cluster(4, 2, made_card))
        timed = cost.times(grid, load)
        found.append(predict(cost, timed, grid, stages, load))
        low = bounds(timed, grid)
        assert low.decode_step <= found[-1].decode_step * 1.000001
        assert low.prefill_step <= found[-1].prefill_step * 1.000001
        assert low.first_token <= found[-1].first_token * 1.000001
    for name in ("decode_step", "prefill_step", "first_token"):
        assert getattr(found[1], name) <= getattr(found[0], name) * 1.000001
    longer = replace(load, context=load.context * 2)
    more = predict(cost, cost.times(grid, longer), grid, stages, longer)
    assert more.decode_step >= found[1].decode_step * 0.999999


def test_an_assumed_imbalance() -> None:
    """Against sums of independent loads drawn ten thousand times."""
    assumed = Assumptions(spread=0.5)
    assert assumed.imbalance(256, 1) == 1.0 and Assumptions(spread=0).imbalance(256, 8) == 1.0
    loads = np.random.default_rng(0).normal(1.0, 0.5, (10_000, 256))
    for slots in (8, 32, 64):
        drawn = loads.reshape(10_000, slots, -1).mean(axis=2).max(axis=1).mean()
        assert drawn <= assumed.imbalance(256, slots) <= 1 + 1.6 * (drawn - 1)


def test_what_the_prediction_assumes_is_said() -> None:
    words = " ".join(Assumptions().sentences())
    for number in ("80%", "60%", "3 us"):
        assert number in words


@pytest.mark.parametrize(
    ("config", "billions"),
    [("deepseek-v3", 37), ("kimi-k3", 104), ("qwen3-235b", 22), ("llama-3.1-70b", 70.6), ("gpt-oss-120b", 5.1)],
)
def test_weights_that_a_token_passes_are_the_published_ones(config: str, billions: float) -> None:
    """Matrices of all layers, the chosen experts alone, the head, and the embedding that publishers count too."""
    binding = open_model(CONFIGS / f"{config}.json")
    work, sizes = Work(binding), binding.model.sizes
    head = work.head(1)
    assert head is not None
    values = head.values * 2 - (head.values if config == "gpt-oss-120b" else 0)  # its card leaves the embedding out
    for kind in work.kinds:
        found = work.kind(kind, 1, 1)
        values += sum(matrices.values for matrices in found.dense)
        values += sizes["topk"] * found.expert.values if found.expert is not None else 0
    assert values / 1e9 == pytest.approx(billions, rel=0.02)
