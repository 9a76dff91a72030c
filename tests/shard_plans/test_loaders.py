"""What can load the shards of a plan; and plans for vLLM, which are those that it can carry out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shard_plans.errors import EngineRefuses
from shard_plans.families.binding import Binding
from shard_plans.layouts.loaders import find_loaders
from shard_plans.layouts.vllm_rules import engine_reasons, plugin_reasons
from shard_plans.verbs import find_plan
from tests.conftest import MakeCheckpoint
from tests.tools.cli import RunCli
from tests.tools.converted import bound
from tests.tools.plans import make_plan

CLUSTER = "1x8:80GB"


@pytest.fixture
def qwen(tiny: MakeCheckpoint) -> Binding:
    """A model with sixteen experts."""
    return bound(tiny("qwen3_moe"))


@pytest.mark.parametrize(
    ("name", "sizes", "reasons"),
    [
        ("qwen3_moe", {"tp": 2, "ep": 2}, [None, None, "can't hold tp 2, pp 1|no module|bias"]),
        ("qwen3_moe", {"dp": 2, "ep": 2}, [None, "give dp 1", "--tp M --ep M"]),
        ("qwen3_moe", {"tp": 4, "ep": 2, "etp": 2}, ["the plan does both", "whole experts to all ranks", "--tp M"]),
        ("qwen3_moe", {"dp": 2, "tp": 2, "ep": 2, "etp": 1}, [None, "give dp 1", "--tp M"]),
        ("gpt_oss", {"tp": 4}, ["tp 4 is above the 2 KV heads", "tp 4 is above the 2 KV heads", "--tp M"]),
        ("llama4_even", {"tp": 2}, ["turns whole query, key", None, "--tp M"]),
        ("llama4_even", {"dp": 2, "ep": 2}, ["turns whole query, key", "give dp 1", "--tp M"]),
        ("mixtral", {"pp": 2}, ["embedding, norm or head on every stage", None, "--tp M|no module"]),
        ("kimi_k25_int4", {"tp": 2}, [None, "INT4|int4", "--tp M"]),
        (
            "llama_odd",
            {"tp": 3},
            ["doesn't divide the vocabulary, which the engine pads to 256", "256", "--tp M|tied|module"],
        ),
    ],
)
def test_each_way_says_why_it_cannot(
    name: str, sizes: dict[str, int], reasons: list[str | None], tiny: MakeCheckpoint
) -> None:
    binding = bound(tiny(name))
    loaders = find_loaders(binding, make_plan(binding, sizes))
    newest = {loader.loader: loader.reason for loader in loaders}
    for found, words in zip(newest.values(), reasons, strict=True):
        assert (found is None) == (words is None), newest
        assert words is None or any(word in str(found) for word in words.split("|")), newest


def test_ranks_with_other_rows_of_the_vocabulary_are_seen(tiny: MakeCheckpoint) -> None:
    """Of 202 rows two ranks have 101 each; the engine pads to 256 first."""
    binding = bound(tiny("llama"))
    odd = replace(binding, model=replace(binding.model, sizes={**binding.model.sizes, "vocab": 202}))
    assert plugin_reasons(odd, make_plan(odd, {})) == []
    (reason,) = plugin_reasons(odd, make_plan(odd, {"tp": 2}))
    assert "each rank has 101 rows of the vocabulary, the engine gives it 128" in reason


def test_only_what_vllm_can_carry_out_is_proposed(qwen: Binding) -> None:
    """A search for reshard itself proposes others too, so that there is something to leave out."""
    proposed = {
        engine: [found.plan.grid, *(other.candidate.grid for other in found.alternatives)]
        for engine in ("reshard", "vllm")
        for found in [find_plan(qwen, CLUSTER, engine=engine, tp=2)]
    }
    assert not any(engine_reasons(qwen, grid) for grid in proposed["vllm"])
    assert any(engine_reasons(qwen, grid) for grid in proposed["reshard"])


@pytest.mark.parametrize("sizes", [{"tp": 8, "ep": 4, "etp": 2}, {"tp": 4, "dp": 2, "ep": 2, "etp": 2}])
def test_sizes_that_vllm_cannot_have_are_refused(sizes: dict[str, Any], qwen: Binding) -> None:
    with pytest.raises(EngineRefuses, match="vllm can't carry out any plan of these sizes: vLLM either"):
        find_plan(qwen, CLUSTER, engine="vllm", **sizes)
    find_plan(qwen, CLUSTER, **sizes)


def test_the_command_says_who_loads_a_plan(tiny: MakeCheckpoint, run_cli: RunCli, tmp_path: Path) -> None:
    folder = tiny("qwen3_moe")
    done = run_cli("plan-memory", folder, "--cluster", CLUSTER, "--engine", "vllm", "--html", tmp_path / "page.html")
    assert "vLLM --load-format reshard: yes" in done.stdout
    assert "What can load its shards" in (tmp_path / "page.html").read_text()
    found = run_cli("plan-memory", folder, "--cluster", CLUSTER, "--json").json["loaders"]
    assert {"engine", "loader", "layout", "reason"} == set(found[0])
    refused = run_cli("plan-memory", folder, "--cluster", CLUSTER, "--engine", "vllm", "--tp", "8", "--ep", "4", code=1)
    assert "the plan does both" in refused.stderr


def test_experts_dealt_by_load_are_no_plan_for_vllm(tiny: MakeCheckpoint, run_cli: RunCli, tmp_path: Path) -> None:
    load = tmp_path / "load.json"
    load.write_text(str({str(layer): [1 + 50 * (e == 3) for e in range(16)] for layer in range(3)}).replace("'", '"'))
    words = ("plan-memory", tiny("qwen3_moe"), "--cluster", CLUSTER, "--ep", "8", "--expert-load", load)
    run_cli(*words)
    assert "balances them by itself" in run_cli(*words, "--engine", "vllm", code=1).stderr
