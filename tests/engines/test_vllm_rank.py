"""Which rank of a plan a process of vLLM is, by hand, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runtime.engines.vllm_rank import Seat, find_rank
from shard_plans.documents.plan import Plan, PlanSource
from shard_plans.errors import RuntimeFault
from shard_plans.placement.experts import ExpertPlacement, contiguous
from shard_plans.placement.grid import make_grid

LAYERS = 6


def plan(experts: int = 8, **sizes: int) -> Plan:
    """A plan of six layers, and one for multi-token prediction behind them."""
    grid = make_grid(**sizes)
    stages = {1: ((0, 7),), 2: ((0, 3), (3, 7))}[grid.pp]
    placement = ExpertPlacement(contiguous(experts, grid.ep)) if experts else ExpertPlacement()
    return Plan(PlanSource("any", "0" * 32, 1, 1), grid, stages, placement)


def seat(tp: int = 1, pp: int = 1, dp: int = 1, ep: bool = False, at: tuple[int, int, int] = (0, 0, 0)) -> Seat:
    """A process at (dp rank, pp rank, tp rank)."""
    size = LAYERS // pp
    return Seat(tp, pp, dp, ep, at[2], at[1], at[0], (at[1] * size, at[1] * size + size))


@pytest.mark.parametrize(
    ("planned", "process", "rank"),
    [
        (plan(), seat(), 0),
        (plan(tp=4), seat(tp=4, at=(0, 0, 3)), 3),
        (plan(tp=2, pp=2, ep=2), seat(tp=2, pp=2, ep=True, at=(0, 1, 1)), 3),
        (plan(dp=2, tp=2, ep=4), seat(dp=2, tp=2, ep=True, at=(1, 0, 0)), 2),
        (plan(dp=2, tp=2, pp=2, etp=4), seat(dp=2, tp=2, pp=2, at=(1, 1, 1)), 7),
        (plan(0, dp=2, tp=2), seat(dp=2, tp=2, at=(1, 0, 1)), 1),  # replicas of a dense model hold the same
        (plan(dp=2, tp=2, etp=2), seat(tp=2, at=(0, 0, 1)), 1),  # so do those that share no experts
    ],
)
def test_the_rank_is_the_one_with_its_place(planned: Plan, process: Seat, rank: int) -> None:
    assert find_rank(planned, LAYERS, process).rank == rank


@pytest.mark.parametrize(
    ("planned", "process", "words"),
    [
        (plan(tp=2), seat(tp=4), "--tensor-parallel-size 4, the shards are for --tensor-parallel-size 2"),
        (plan(tp=2, ep=2), seat(tp=2), "start the engine with --enable-expert-parallel"),
        (plan(tp=2), seat(tp=2, ep=True), "start the engine without --enable-expert-parallel"),
        (plan(dp=2, ep=2), seat(ep=True), "--data-parallel-size 1, the shards are for --data-parallel-size 2"),
        (plan(tp=4, ep=2, etp=2), seat(tp=4, ep=True), "the plan does both"),
        (
            replace(plan(pp=2), stages=((0, 2), (2, 7))), seat(pp=2),
            "layers 0 to 1, the engine's has 0 to 2; set VLLM_PP_LAYER_PARTITION=2,4",
        ),
        (
            replace(plan(tp=2, ep=2), experts=ExpertPlacement(((1, 0, 2, 3), (4, 5, 6, 7)))), seat(tp=2, ep=True),
            "places them otherwise",
        ),
        (plan(), replace(seat(), otherwise=("--enable-eplb",)), "--enable-eplb place weights otherwise"),
    ],
)  # fmt: skip
def test_another_start_is_refused(planned: Plan, process: Seat, words: str) -> None:
    with pytest.raises(RuntimeFault, match=words):
        find_rank(planned, LAYERS, process)
