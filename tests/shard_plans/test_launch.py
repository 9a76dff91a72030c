"""Launch commands: what an engine makes of the flags, by its own rules, is what the plan says; else it says why not."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shard_plans.documents.plan import Plan, Workload
from shard_plans.errors import ReshardError
from shard_plans.families.binding import Binding
from shard_plans.launch.command import Launch
from shard_plans.launch.launch import launches
from shard_plans.launch.sglang import sglang_launch
from shard_plans.launch.vllm import vllm_launch
from shard_plans.memory.cluster import parse_cluster
from shard_plans.placement.experts import ExpertPlacement
from shard_plans.placement.grid import Grid
from shard_plans.search.search import make_plan
from shard_plans.verbs import open_model
from tests.tools import cli

CONFIGS = Path(__file__).parents[1] / "checkpoints" / "configs"


@cache
def model(name: str) -> Binding:
    return open_model(CONFIGS / f"{name}.json")


def planned(name: str, grid: Grid, **load: Any) -> Plan:
    cluster = parse_cluster(f"{-(-grid.world // 8)}x8:h200")
    return make_plan(model(name), grid, workload=Workload(**load), cluster=cluster)


def flag(launch: Launch, name: str, default: int = 1) -> int:
    words = launch.commands[0].words
    return int(words[words.index(name) + 1]) if name in words else default


def ranges(text: str) -> list[range]:
    """Layers of each stage, as get_pp_indices of both engines reads the partition."""
    counts = [int(word) for word in text.split(",")]
    return [range(sum(counts[:stage]), sum(counts[: stage + 1])) for stage in range(len(counts))]


def dealt(experts: int, slot: int, slots: int) -> range:
    """The experts of a slot by vLLM's determine_expert_map, linear: the first slots hold one more."""
    base, more = divmod(experts, slots)
    start = slot * base + min(slot, more)
    return range(start, start + base + (slot < more))


GRIDS = st.builds(
    Grid, st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]),
)  # fmt: skip


@settings(max_examples=60)
@given(GRIDS)
def test_the_engine_makes_of_the_flags_what_the_plan_says(grid: Grid) -> None:
    if grid.stage_ranks % (grid.ep * grid.etp):
        return
    try:
        plan = planned("deepseek-v3", grid)
    except ReshardError:
        return
    layers, experts = 61, 256
    vllm, sglang = vllm_launch(plan, "M", layers), sglang_launch(plan, "M", layers)
    if grid.dp > 1 and grid.edp % grid.dp == 0:  # replicas that share nothing are servers of their own
        assert all(f"each of {grid.dp} replicas" in c.where for c in (*vllm.commands, *sglang.commands))
        grid = Grid(grid.tp, grid.pp, 1, grid.ep, grid.etp)
    whole, cut = grid.ep == grid.stage_ranks, grid.etp == grid.stage_ranks
    assert bool(vllm.commands) == (whole or cut) != bool(vllm.reasons)
    assert sglang.commands and not sglang.reasons
    for launch, variable in ((vllm, "VLLM"), (sglang, "SGLANG")):
        if launch.commands and grid.pp > 1:
            stages = ranges(launch.commands[0].environment[f"{variable}_PP_LAYER_PARTITION"])
            assert stages[-1].stop == layers
            assert [(r.start, r.stop) for r in stages[:-1]] == list(plan.stages[:-1])
    for at in grid.coordinates()[: grid.stage_ranks]:
        held = plan.experts.held(5, grid, at.edp, at.ep)
        if vllm.commands:
            tp, dp = flag(vllm, "--tensor-parallel-size"), flag(vllm, "--data-parallel-size")
            replica, tensor = divmod(at.rank, tp)
            assert (replica, tensor) == (at.dp, at.tp) and tp * dp == grid.stage_ranks
            parallel = "--enable-expert-parallel" in vllm.commands[0].words
            slot, slots = (replica * tp + tensor, dp * tp) if parallel else (0, 1)
            assert tuple(dealt(experts, slot, slots)) == held
        tp, dp = flag(sglang, "--tp-size"), flag(sglang, "--dp-size")
        ep, copies = flag(sglang, "--ep-size"), flag(sglang, "--moe-dp-size")
        attention, moe = tp // dp, tp // ep // copies
        assert (at.rank // attention, at.rank % attention) == (at.dp, at.tp)
        assert (at.rank // (ep * moe), at.rank // moe % ep, at.rank % moe) == (at.edp, at.ep, at.etp)
        assert tuple(dealt(experts, at.rank // moe % ep, ep)) == held
        assert ("--enable-dp-attention" in sglang.commands[0].words) == (grid.dp > 1)


def test_layers_for_multi_token_prediction_are_not_counted() -> None:
    plan = planned("deepseek-v3", Grid(8, 4, 1, 8, 1))
    assert plan.stages[-1][1] == 62
    partition = vllm_launch(plan, "M", 61).commands[0].environment["VLLM_PP_LAYER_PARTITION"]
    assert sum(map(int, partition.split(","))) == 61
    assert "--speculative-config" in vllm_launch(plan, "M", 61).notes[-1]
    assert not vllm_launch(planned("kimi-k3", Grid(8, 4, 1, 8, 1)), "M", 93).notes


def test_nodes() -> None:
    one = vllm_launch(planned("qwen3-235b", Grid(4, 1, 2, 8, 1)), "M", 94)
    assert len(one.commands) == 1 and "--nnodes" not in one.commands[0].words
    wide = vllm_launch(planned("deepseek-v3", Grid(8, 2, 1, 8, 1)), "M", 61)
    assert [c.where for c in wide.commands] == ["node 0", "node 1"] and flag(wide, "--nnodes") == 2
    assert "--headless" in wide.commands[1].words and "--headless" not in wide.commands[0].words
    replicas = vllm_launch(planned("deepseek-v3", Grid(4, 1, 8, 32, 1)), "M", 61)
    assert flag(replicas, "--data-parallel-size-local") == 2
    assert "$((NODE * 2))" in replicas.commands[1].text and replicas.commands[1].where == "nodes 1-3"
    spread = vllm_launch(planned("deepseek-v3", Grid(8, 2, 2, 16, 1)), "M", 61)
    assert spread.commands[0].environment["VLLM_RAY_DP_PACK_STRATEGY"] == "span" and spread.notes
    mine = launches(planned("qwen3-235b", Grid(4, 3, 1, 4, 1)), model("qwen3-235b").model, "M")[0]
    assert mine.commands[1].text.startswith("torchrun --nnodes 2 --nproc-per-node 6 --node-rank $NODE")


@pytest.mark.parametrize(
    ("grid", "load", "engine", "reason"),
    [
        (Grid(8, 1, 1, 2, 1), {}, "vllm", r"the plan keeps 4 copies of them \(ep 2 x etp 1\)"),
        (Grid(4, 1, 2, 4, 2), {}, "vllm", r"the plan does both \(ep 4, etp 2\)"),
        (Grid(8, 1, 1, 8, 1), {"kv_dtype": "int8"}, "vllm", "no KV cache of type int8"),
        (Grid(8, 1, 1, 8, 1), {"kv_dtype": "mxfp8"}, "sglang", "no KV cache of type mxfp8"),
        (Grid(8, 1, 1, 4, 1), {"dispatch": "deepep_low_latency"}, "sglang", "DeepEP wants one copy"),
        (Grid(8, 1, 1, 4, 2), {"dispatch": "deepep_low_latency"}, "sglang", "DeepEP deals whole experts"),
    ],
)
def test_what_an_engine_cannot_express(grid: Grid, load: dict[str, Any], engine: str, reason: str) -> None:
    plan = planned("deepseek-v3", grid, **load)
    found = {each.engine: each for each in launches(plan, model("deepseek-v3").model, "M")}[engine]
    assert not found.commands
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(" ".join(found.reasons))


def test_experts_placed_otherwise() -> None:
    plan = planned("mixtral-8x7b", Grid(2, 1, 1, 2, 1))
    swapped = replace(plan, experts=ExpertPlacement(((4, 5, 6, 7, 0), (0, 1, 2, 3, 4))))
    vllm, sglang = vllm_launch(swapped, "M", 32), sglang_launch(swapped, "M", 32)
    assert "places experts in order" in vllm.reasons[0]
    places = json.loads(sglang.files["experts.json"])["physical_to_logical_map"]
    assert places == [[4, 5, 6, 7, 0, 0, 1, 2, 3, 4]] * 32 and flag(sglang, "--ep-num-redundant-experts") == 2
    uneven = replace(plan, experts=ExpertPlacement(((0, 1, 2, 3, 4), (5, 6, 7))))
    assert "equally many; the plan gives 3 to 5" in sglang_launch(uneven, "M", 32).reasons[0]
    assert not sglang_launch(plan, "M", 32).files


def test_a_plan_in_another_precision_is_for_reshard_alone() -> None:
    plan = replace(planned("mixtral-8x7b", Grid(2, 1, 1, 2, 1)), weights={"experts": "fp8_block"})
    mine, vllm, sglang = launches(plan, model("mixtral-8x7b").model, "M")
    assert mine.commands and not vllm.commands and not sglang.commands
    assert "reads the checkpoint as it is stored; the plan stores experts as fp8_block" in vllm.reasons[0]


def test_a_dense_model_has_no_expert_flags() -> None:
    for launch in launches(planned("llama-3.1-8b", Grid(4, 2, 1, 1, 4)), model("llama-3.1-8b").model, "M"):
        assert launch.commands and not any("expert" in w or "ep-size" in w for w in launch.commands[0].words)


def test_the_shell_gets_one_word_for_each() -> None:
    plan, name = planned("llama-3.1-8b", Grid(2)), "$(touch x); it's; `a` here"
    for launch in launches(plan, model("llama-3.1-8b").model, name):
        for command in launch.commands:
            assert name in command.words and tuple(shlex.split(command.text)) == command.words


def test_on_the_command_line(tmp_path: Path) -> None:
    config = CONFIGS / "qwen3-30b.json"
    ran = cli.run("plan-memory", config, "--cluster", "1x8:h200", "--launch")
    assert "vllm serve CHECKPOINT" in ran.stdout and "sglang.launch_server --model-path CHECKPOINT" in ran.stdout
    assert "torchrun" in ran.stdout and "reshard convert CHECKPOINT shards --plan plan.yaml" in ran.stdout
    found = json.loads(cli.run("plan-memory", config, "--cluster", "1x8:h200", "--launch", "--json").stdout)
    assert [each["engine"] for each in found["launch"]] == ["reshard", "vllm", "sglang"]
    assert found["launch"][1]["commands"][0]["words"][:2] == ["vllm", "serve"]
    assert "# note: -o plan.yaml writes the plan" in ran.stdout
    ran = cli.run("plan-memory", config, "--cluster", "1x8:h200", "--launch", "-o", tmp_path / "my plan.yaml")
    assert f"shards --plan '{tmp_path / 'my plan.yaml'}'" in ran.stdout and "writes the plan" not in ran.stdout
    assert "launch" not in json.loads(cli.run("plan-memory", config, "--cluster", "1x8:h200", "--json").stdout)
