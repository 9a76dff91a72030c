"""Routers and expert dispatch over folded grids, against transformers' modules."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from runtime.blocks.forward import run_layer
from runtime.blocks.moe import moe
from runtime.blocks.router import Routing, route
from runtime.comm.comm import Comm, NoComm
from runtime.comm.virtual import VirtualWorld
from shard_plans.errors import RuntimeFault
from shard_plans.placement.experts import ExpertPlacement
from shard_plans.placement.grid import Grid, make_grid
from tests.tools.oracle import Oracle, context, cut, make, relative, tokens

MODELS = ("mixtral", "qwen3_moe", "qwen3_moe_raw", "v3_moe")
GRIDS = {
    "one rank": make_grid(),
    "tp2": make_grid(tp=2),
    "tp2 ep2": make_grid(tp=2, ep=2),
    "tp4 ep2 etp2": make_grid(tp=4, ep=2, etp=2),
    "tp4 ep2 etp1, expert replicas": make_grid(tp=4, ep=2, etp=1),
    "dp4 ep2 etp1": make_grid(dp=4, ep=2, etp=1),
    "dp2 tp2 ep4": make_grid(dp=2, tp=2, ep=4),
    "dp2 tp2 ep2 etp2": make_grid(dp=2, tp=2, ep=2),
    "dp2, experts cut over both replicas": make_grid(dp=2),
}
LIMIT = 2e-6


def run(
    oracle: Oracle, grid: Grid, x: list[Tensor], experts: ExpertPlacement | None = None, fuse: bool = True
) -> list[tuple[Tensor, Routing]]:
    """The whole layer on every rank; x is one sequence a dp replica."""

    def rank(comm: Comm) -> tuple[Tensor, Routing]:
        ctx = context(oracle, grid, comm, experts=experts)
        mine = x[ctx.at.dp]
        y, routing = run_layer(ctx, oracle.layer, cut(oracle, ctx, fuse), mine, None, torch.arange(mine.shape[0]))
        assert routing is not None
        return y, routing

    return VirtualWorld(grid.world).run(rank)


def worst(oracle: Oracle, grid: Grid, outputs: list[tuple[Tensor, Routing]], x: list[Tensor]) -> float:
    """Worst relative error over ranks of what the layer added to its replica's tokens."""
    added = [oracle.forward(mine) - mine for mine in x]
    places = [grid.coordinate(rank).dp for rank in range(grid.world)]
    return max(relative(y - x[dp], added[dp]) for (y, _), dp in zip(outputs, places, strict=True))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("grid", GRIDS)
def test_a_moe_layer_equals_transformers(name: str, grid: str) -> None:
    oracle, sizes = make(name), GRIDS[grid]
    x = [tokens(13 - dp, seed=dp) for dp in range(sizes.dp)]
    assert worst(oracle, sizes, run(oracle, sizes, x), x) < LIMIT


@pytest.mark.parametrize("name", ["mixtral", "v3_moe"])
def test_listed_experts_give_the_same(name: str) -> None:
    oracle, grid, x = make(name), make_grid(tp=2, ep=2), [tokens(9)]
    assert worst(oracle, grid, run(oracle, grid, x, fuse=False), x) < LIMIT


PLACEMENTS: dict[str, tuple[Grid, tuple[tuple[int, ...], ...]]] = {
    "uneven": (make_grid(tp=4, ep=4), ((5,), (2, 0, 4), (6, 1, 3), (7,))),
    "redundant copies": (make_grid(tp=2, ep=2), ((0, 1, 2, 3, 4, 5), (5, 0, 6, 7, 0))),
    "replicas differ": (make_grid(tp=4, ep=2, etp=1), ((0, 1, 2, 3), (4, 5, 6, 7), (7, 5, 3, 1), (0, 2, 4, 6))),
    "no token comes": (make_grid(dp=4, ep=4, etp=1), ((0, 1, 2, 3, 4, 5, 6, 7), (0,), (1,), (2, 3))),
}


@pytest.mark.parametrize("what", PLACEMENTS)
@pytest.mark.parametrize("count", [1, 3, 16])
def test_experts_may_lie_anywhere(what: str, count: int) -> None:
    oracle = make("v3_moe")
    grid, slots = PLACEMENTS[what]
    x = [tokens(count, seed=dp) for dp in range(grid.dp)]
    assert worst(oracle, grid, run(oracle, grid, x, ExpertPlacement(slots)), x) < LIMIT


def test_three_ranks_share_four_experts() -> None:
    # Heads don't divide by 3, so the block runs without its attention.
    oracle, grid, x = make("mixtral"), make_grid(tp=3, ep=3), tokens(8)
    slots = ((0, 1), (2, 3), (4, 5))

    def rank(comm: Comm) -> tuple[Tensor, Routing]:
        ctx = context(oracle, grid, comm, experts=ExpertPlacement(slots))
        kept = {n: w for n, w in oracle.whole.items() if n.startswith(("moe.", "experts."))}
        return moe(ctx, oracle.layer, cut(replace(oracle, whole=kept), ctx), x)

    with torch.no_grad():
        expected = oracle.hf.mlp(x[None])[0]
    assert max(relative(y, expected) for y, _ in VirtualWorld(3).run(rank)) < LIMIT


@pytest.mark.parametrize("name", MODELS)
def test_the_router_chooses_as_transformers(name: str) -> None:
    oracle, x = make(name), tokens(200)
    with torch.no_grad():
        _, weights, indices = oracle.hf.mlp.gate(x)
    bias = oracle.whole.get("moe.router_bias")
    ours = route(oracle.layer.words, oracle.model.sizes["topk"], x, oracle.whole["moe.router"], bias)
    order, expected = ours.indices.argsort(-1), indices.argsort(-1)
    assert torch.equal(ours.indices.gather(1, order), indices.gather(1, expected))
    assert relative(ours.weights.gather(1, order), weights.gather(1, expected)) < LIMIT
    assert bool((ours.margin >= 0).all()) and ours.scores_for_choice.shape == (200, oracle.model.sizes["experts"])


def test_equal_scores_are_chosen_as_transformers() -> None:
    oracle = make("v3_moe")
    router = torch.zeros_like(oracle.whole["moe.router"])
    oracle.hf.mlp.gate.weight.data.copy_(router)
    oracle.hf.mlp.gate.e_score_correction_bias.zero_()
    with torch.no_grad():
        _, _, indices = oracle.hf.mlp.gate(tokens(5))
    ours = route(oracle.layer.words, 3, tokens(5), router, torch.zeros(8))
    assert torch.equal(ours.indices.sort(-1).values, indices.sort(-1).values)
    assert float(ours.margin.max()) == 0


def test_the_margin_sees_groups_and_experts() -> None:
    words = {"score": "sigmoid", "groups": 2, "topk_groups": 1, "group_score": "max"}
    router = torch.eye(4)
    scores = torch.tensor([[0.9, 0.1, 0.899, 0.2], [0.9, 0.85, 0.1, 0.2], [0.3, 0.3, 0.1, 0.2]])
    routing = route(words, 1, torch.logit(scores), router, None)
    assert torch.allclose(routing.margin, torch.tensor([0.001, 0.05, 0.0]), atol=1e-6)
    assert torch.equal(routing.scores_for_choice.isinf().sum(-1), torch.tensor([2, 2, 2]))
    everything = route({"score": "softmax"}, 4, scores, router, None)
    assert bool(everything.margin.isinf().all())


@pytest.mark.parametrize(
    ("words", "topk", "message"),
    [
        ({"groups": 3, "group_score": "max"}, 1, "3 of 3 groups of 8 experts"),
        ({"groups": 8, "topk_groups": 4, "group_score": "top2_sum"}, 1, "top2_sum needs 2 experts a group"),
        ({}, 9, "choose 9 of 8 experts"),
    ],
)
def test_impossible_choices_are_refused(words: dict[str, object], topk: int, message: str) -> None:
    with pytest.raises(RuntimeFault, match=message):
        route({"score": "softmax", **words}, topk, tokens(2), tokens(8), None)


def test_swapped_experts_are_seen() -> None:
    oracle, grid, x = make("qwen3_moe"), make_grid(tp=2, ep=2), [tokens(16)]
    right = ExpertPlacement(((0, 1, 2, 3), (4, 5, 6, 7)))

    def rank(comm: Comm) -> tuple[Tensor, Routing]:
        ctx = context(oracle, grid, comm, experts=right)
        lying = context(oracle, grid, comm, experts=ExpertPlacement(((0, 2, 1, 3), (4, 5, 6, 7))))
        y, routing = run_layer(ctx, oracle.layer, cut(oracle, lying), x[0], None, torch.arange(16))
        assert routing is not None
        return y, routing

    assert worst(oracle, grid, run(oracle, grid, x, right), x) < LIMIT
    assert worst(oracle, grid, VirtualWorld(2).run(rank), x) > 1e-2


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("v3_moe", {"group_score": "max"}),
        ("v3_moe", {"groups": None}),
        ("v3_moe", {"scale": 1.0}),
        ("v3_moe", {"renormalize": False}),
        ("qwen3_moe", {"renormalize": False}),
        ("qwen3_moe_raw", {"renormalize": True}),
        ("mixtral", {"score": "sigmoid"}),
    ],
)
def test_a_wrong_router_word_is_seen(name: str, words: dict[str, object]) -> None:
    oracle, x = make(name), [tokens(64)]
    wrong = replace(oracle, layer=replace(oracle.layer, words={**oracle.layer.words, **words}))
    assert worst(oracle, make_grid(), run(wrong, make_grid(), x), x) > 1e-3


@pytest.mark.parametrize("word", ["router_bias", "shared"])
def test_weights_that_no_word_asks_for_are_refused(word: str) -> None:
    oracle = make("v3_moe")
    wrong = replace(oracle, layer=replace(oracle.layer, words={**oracle.layer.words, word: None}))
    with pytest.raises(RuntimeFault, match="layer 1: no block reads " + ("moe.router_bias" if "r_b" in word else word)):
        run(wrong, make_grid(), [tokens(3)])


def test_the_router_bias_is_never_rounded() -> None:
    oracle = make("v3_moe")
    bias = torch.full((8,), 7.0).scatter(0, torch.tensor([3]), 7.0001)
    whole = {**oracle.whole, "moe.router_bias": bias, "moe.router": torch.zeros(8, 32)}
    flat = replace(oracle, whole=whole)
    ctx = context(flat, make_grid(), NoComm(), torch.bfloat16)
    x = tokens(4).bfloat16()
    _, routing = run_layer(ctx, oracle.layer, cut(flat, ctx), x, None, torch.arange(4))
    assert routing is not None
    assert bool((routing.indices == 3).any(-1).all()) and float(routing.margin.min()) >= 0
    assert torch.equal(routing.indices[:, 0], torch.full((4,), 3))
    assert float(bias.bfloat16()[3]) == float(bias.bfloat16()[2])


@pytest.mark.parametrize("compute", [torch.float64, torch.bfloat16])
def test_other_compute_types(compute: torch.dtype) -> None:
    oracle, grid, x = make("v3_moe"), make_grid(tp=2, ep=2), tokens(16)

    def rank(comm: Comm) -> Tensor:
        ctx = context(oracle, grid, comm, compute)
        return run_layer(ctx, oracle.layer, cut(oracle, ctx), x.to(compute), None, torch.arange(16))[0]

    for y in VirtualWorld(2).run(rank):
        assert y.dtype == compute
        assert relative(y, oracle.forward(x)) < (LIMIT if compute == torch.float64 else 0.05)


def test_weights_that_do_not_fit_the_placement_are_refused() -> None:
    oracle = make("mixtral")
    ctx = context(oracle, make_grid(), NoComm())
    weights = cut(oracle, ctx)
    down = weights["experts.down"]
    assert not isinstance(down, tuple)
    with pytest.raises(RuntimeFault, match=r"experts\.down holds 5 experts, the plan gives this rank 6"):
        short = {**weights, "experts.down": replace(down, values=down.values[:5])}
        run_layer(ctx, oracle.layer, short, tokens(3), None, torch.arange(3))
    with pytest.raises(RuntimeFault, match=r"scores 6 experts, the model has 7"):
        more = replace(oracle.model, sizes={**oracle.model.sizes, "experts": 7})
        run_layer(replace(ctx, model=more), oracle.layer, weights, tokens(3), None, torch.arange(3))
    with pytest.raises(RuntimeFault, match="expert 5 is held by no ep slot"):
        lost = replace(ctx, experts=ExpertPlacement(((0, 1, 2, 3, 4, 4),)))
        run_layer(lost, oracle.layer, weights, tokens(3), None, torch.arange(3))
