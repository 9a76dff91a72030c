"""What the search is for: its plan beats the others by the goal's own measure, and the others say why they lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shard_plans.cost.model import cost_model
from shard_plans.cost.prediction import Prediction, predict
from shard_plans.documents.plan import Plan, Workload
from shard_plans.errors import PlanError
from shard_plans.families.binding import Binding
from shard_plans.memory.cluster import Cluster, parse_cluster
from shard_plans.memory.payload import Payload
from shard_plans.placement.grid import Grid
from shard_plans.placement.place import place
from shard_plans.search.candidate import Candidate
from shard_plans.search.found import Found
from shard_plans.search.goals import GOALS, behind, best_of
from shard_plans.search.grids import legal_grids
from shard_plans.search.longest import longest_context, most
from shard_plans.search.rejected import Verdicts
from shard_plans.search.search import explore
from shard_plans.search.space import Space
from tests.conftest import MakeCheckpoint
from tests.tools.converted import bound

LOAD = Workload(64, 16, prefill_chunk=64, utilization=1)
NODES = parse_cluster("2x4:h100")


def predicted(binding: Binding, plan: Plan) -> Prediction:
    """The prediction of a finished plan, anew."""
    assert plan.cluster is not None
    cost = cost_model(binding, plan.cluster)
    run = len(binding.model.forward_layers)
    stages = tuple((first, min(stop, run)) for first, stop in plan.stages)
    return predict(cost, cost.times(plan.grid, plan.workload), plan.grid, stages, plan.workload)


@pytest.mark.parametrize("family", ["llama", "mixtral", "deepseek_v3_mtp"])
@pytest.mark.parametrize("goal", ["throughput", "latency"])
def test_no_grid_alone_is_better(tiny: MakeCheckpoint, family: str, goal: str) -> None:
    """The bounds that spare most grids their stages lose no better plan (3 % count as equal)."""
    binding = bound(tiny(family))
    found = explore(binding, NODES, workload=LOAD, goal=goal)
    assert found.plan.fits and place(binding, found.plan) and found.prediction == predicted(binding, found.plan)
    for grid in legal_grids(binding, NODES, {}):
        sizes = {axis: getattr(grid, axis) for axis in ("tp", "pp", "dp", "ep", "etp")}
        other = explore(binding, NODES, sizes, LOAD, goal=goal)
        assert other.prediction is not None and other.plan.grid == grid
        assert found.prediction.decode_step <= other.prediction.decode_step * 1.031


def test_what_counts_as_equal_is_three_per_cent_of_the_best() -> None:
    """Not steps of three per cent, whose borders would tell apart what differs by less."""

    def made(grid: Grid, decode: float, prefill: float) -> Candidate:
        return Candidate(grid, (), 0, Prediction(decode, 0, prefill, 0, prefill, 0, 0, 0))

    fast, near, far = made(Grid(4), 1.0, 2.0), made(Grid(2), 1.029, 1.0), made(Grid(1), 1.031, 0.5)
    for goal in GOALS:
        assert best_of([fast, near, far], goal, LOAD) is near
        assert best_of([fast, far], goal, LOAD) is fast
        for whole in (1.0, 1.02):
            assert best_of([made(Grid(4, etp=4), 1.0, 1.0), near, made(Grid(1), whole, 1.02)], goal, LOAD).grid == Grid(
                1
            )


def test_why_an_equal_plan_was_not_taken() -> None:
    best = Candidate(Grid(4), (), 0, Prediction(1.0, 16, 2.0, 0, 3.0, 0, 0, 0))
    other = Prediction(0.98, 17, 3.0, 0, 3.3, 0, 0, 0)
    assert behind("throughput", (Grid(2), other), best, LOAD) == "prefill takes 50% longer"
    assert behind("throughput", (Grid(2, dp=2), other), best, LOAD) == "it is less simple"  # two replicas prefill
    assert behind("latency", (Grid(2), other), best, LOAD) == "the first token takes 10% longer"
    verdicts = Verdicts(0)
    verdicts.speed(Grid(2), 17, 0.1, "prefill takes 50% longer")
    assert "at most 17 tokens/s, the best plan 16: as good as equal, but prefill" in verdicts.groups(best)[0].detail
    verdicts.speed(Grid(2), 15, 0.1, "prefill takes 50% longer")
    assert "equal" not in verdicts.groups(best)[0].detail


def test_the_others_say_what_they_trade_and_why_they_lost(tiny: MakeCheckpoint) -> None:
    found = explore(bound(tiny("mixtral")), NODES, workload=LOAD)
    assert len(found.alternatives) == 5
    shapes = [(other.candidate.grid.tp, other.candidate.grid.pp) for other in found.alternatives]
    assert len(set(shapes)) > 2 and found.plan.grid not in [other.candidate.grid for other in found.alternatives]
    for other in found.alternatives:
        assert other.room > 0 and "room" in other.trades and "tokens/s" in other.trades
    assert sum(group.grids for group in found.rejected) == found.grids - 1
    assert all("tokens/s" in group.detail for group in found.rejected if group.grids)
    assert {group.tp for group in found.rejected if group.reason == "nodes"} == {8}  # legal, but not in a node of 4
    assert any("assumed" in line or "Sources" in line for line in found.assumptions)


def test_what_does_not_fit_is_rejected_for_its_memory(tiny: MakeCheckpoint) -> None:
    binding = bound(tiny("mixtral"))
    load = replace(LOAD, context=1 << 20, concurrency=64)  # the cache dwarfs what every rank needs
    least = Space(binding, Payload(binding), NODES, load).roomiest().need
    cluster = replace(NODES, card=replace(NODES.card, memory=int(1.2 * least)))
    found = explore(binding, cluster, workload=load)
    assert found.plan.fits and {group.reason for group in found.rejected if group.grids} == {"memory", "speed"}
    none = explore(binding, replace(cluster, card=replace(NODES.card, memory=10**6)), workload=LOAD)
    assert none.plan.fits is False and none.prediction is None and not none.alternatives
    assert {group.reason for group in none.rejected if group.grids} == {"memory"}


def test_strict_blocks_reject_what_cuts(tiny: MakeCheckpoint) -> None:
    found = explore(bound(tiny("deepseek_v3_fp8")), parse_cluster("1x4:h100"), workload=LOAD, strict_blocks=True)
    assert found.plan.fits and any("inside a quantisation block" in group.detail for group in found.rejected)


def card_of(found: Found, share: float) -> Cluster:
    """A card whose memory is `share` of what the fullest rank takes."""
    assert found.plan.ledger is not None and found.plan.cluster is not None
    memory = int(share * max(row.total for row in found.plan.ledger))
    return replace(found.plan.cluster, card=replace(found.plan.cluster.card, memory=memory))


def test_the_fewest_cards_are_the_fewest(tiny: MakeCheckpoint) -> None:
    binding = bound(tiny("mixtral"))
    load = Workload(1 << 20, 1024, prefill_chunk=64, utilization=1)  # the cache dwarfs what every rank needs
    alone = explore(binding, parse_cluster("1x1:h100"), workload=load)
    cluster = replace(card_of(alone, 0.4), nodes=2, cards=4)
    found = explore(binding, cluster, workload=load, goal="fewest-cards")
    assert found.plan.fits and found.plan.cluster is not None
    fewest = found.plan.cluster.world
    assert 2 < fewest < 8
    for cards in range(1, fewest):
        assert explore(binding, replace(cluster, nodes=1, cards=cards), workload=load).plan.fits is False
    one = explore(binding, card_of(alone, 1.0), workload=load, goal="fewest-cards")
    assert one.plan.cluster is not None and one.plan.cluster.world == 1


def test_the_longest_context_is_the_longest(tiny: MakeCheckpoint) -> None:
    binding = bound(tiny("llama"))
    limit = binding.model.text["max_position_embeddings"]
    easy = explore(binding, parse_cluster("1x2:h100"), workload=LOAD, goal="context")
    assert easy.plan.workload.context == limit  # never longer than the model was made for
    half = explore(binding, parse_cluster("1x2:h100"), workload=replace(LOAD, context=limit // 2))
    space = Space(binding, Payload(binding), card_of(half, 1.0), LOAD)
    longest = longest_context(space).workload.context
    assert limit // 2 <= longest < limit
    assert space.under(context=longest).fits() and not space.under(context=longest + 1).fits()
    found = explore(binding, space.cluster, workload=LOAD, goal="context")
    assert found.plan.fits and found.plan.workload.context == longest


@pytest.mark.parametrize(("edge", "limit"), [(0, 100), (1, 100), (7, 100), (64, 100), (99, 100), (100, 100), (1, 1)])
def test_the_most_that_holds(edge: int, limit: int) -> None:
    assert most(lambda number: number <= edge, limit) == min(edge, limit)


def test_unknown_goals_are_refused(tiny: MakeCheckpoint) -> None:
    with pytest.raises(PlanError, match=f"allowed: {', '.join(GOALS)}"):
        explore(bound(tiny("llama")), NODES, goal="cheapest")


def test_tp_stays_inside_a_node_unless_told_otherwise(tiny: MakeCheckpoint) -> None:
    binding = bound(tiny("llama"))
    assert all(grid.tp <= 4 for grid in legal_grids(binding, NODES, {}))
    assert {grid.tp for grid in legal_grids(binding, NODES, {}, wide=True)} > {8}
