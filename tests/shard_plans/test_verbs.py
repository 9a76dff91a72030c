"""The command plan-memory beyond the search: plans counted anew, token counts as people write them."""

from __future__ import annotations

from pathlib import Path

import pytest

import reshard
from shard_plans.errors import PlanError
from shard_plans.options import TOKENS
from tests.conftest import MakeCheckpoint
from tests.tools.cli import RunCli


@pytest.fixture
def plan(tiny: MakeCheckpoint, run_cli: RunCli, tmp_path: Path) -> Path:
    """Three stages, one layer each."""
    path = tmp_path / "plan.yaml"
    run_cli("plan-memory", tiny("llama"), "--cluster", "1x3:80GB", "--pp", 3, "-o", path)
    return path


def test_an_edited_plan_is_counted_anew(plan: Path, tiny: MakeCheckpoint, run_cli: RunCli) -> None:
    before = run_cli("plan-memory", tiny("llama"), "--plan", plan, "--json").json
    text = plan.read_text()
    assert "- 0\n- 1\n- 2\n" in text
    plan.write_text(
        text.replace("parallel: {tp: 1, pp: 3", "parallel: {tp: 1, pp: 2").replace("- 0\n- 1\n- 2\n", "- 0\n- 1-2\n")
    )
    after = run_cli("plan-memory", tiny("llama"), "--plan", plan, "--json").json
    assert after["parallel"]["world"] == 2 and after["stages"] == [[0, 1], [1, 3]]
    sums = [sum(rank["weights"] for rank in found["ranks"]) for found in (before, after)]
    assert sums[0] == sums[1]
    assert after["ranks"][1]["weights"] == before["ranks"][1]["weights"] + before["ranks"][2]["weights"]


def test_a_plan_is_counted_for_another_cluster(plan: Path, tiny: MakeCheckpoint, run_cli: RunCli) -> None:
    found = run_cli("plan-memory", tiny("llama"), "--plan", plan, "--cluster", "1x3:1GB", "--json", code=1).json
    assert found["fits"] is False and found["ranks"][0]["capacity"] == 10**9
    ran = run_cli("plan-memory", tiny("llama"), "--plan", plan, "--cluster", "1x2:80GB", code=2)
    assert "the plan has 3 ranks, the cluster 1x2:80GB 2 cards" in ran.stderr


def test_what_the_plan_says_is_not_said_again(plan: Path, tiny: MakeCheckpoint, run_cli: RunCli) -> None:
    ran = run_cli("plan-memory", tiny("llama"), "--plan", plan, "--tp", 2, "--context", "1M", code=2)
    assert "--plan contradicts --tp, --context" in ran.stderr
    assert "give --cluster" in run_cli("plan-memory", tiny("llama"), code=2).stderr


def test_a_misspelt_key_is_named(plan: Path, tiny: MakeCheckpoint, run_cli: RunCli, tmp_path: Path) -> None:
    plan.write_text(plan.read_text().replace("mtp: keep", "mpt: keep"))
    ran = run_cli("convert", tiny("llama"), tmp_path / "out", "--plan", plan, code=2)
    assert "unknown key 'mpt'" in ran.stderr


@pytest.mark.parametrize(("text", "tokens"), [("8192", 8192), ("128K", 131_072), ("1m", 1_048_576)])
def test_tokens_as_people_write_them(text: str, tokens: int) -> None:
    assert TOKENS.convert(text, None, None) == tokens


def test_a_context_that_the_model_is_not_made_for(tiny: MakeCheckpoint, run_cli: RunCli) -> None:
    ran = run_cli("plan-memory", tiny("llama"), "--cluster", "1x1:80GB", "--context", "1M", code=2)
    assert "context 1048576 is longer than the" in ran.stderr and "max_position_embeddings" in ran.stderr


@pytest.mark.parametrize("text", ["0", "-1", "1G", "many", "1.5K"])
def test_what_is_no_number_of_tokens(tiny: MakeCheckpoint, run_cli: RunCli, text: str) -> None:
    ran = run_cli("plan-memory", tiny("llama"), "--cluster", "1x1:80GB", f"--context={text}", code=2)
    assert "isn't a number of tokens" in ran.stderr


def test_the_python_interface_refuses_what_the_command_refuses(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="mtp is 'x'"):
        reshard.plan_memory(tiny("llama"), "1x1:80GB", mtp="x")
    with pytest.raises(reshard.ReshardError, match="tp were both given"):
        reshard.convert(tiny("llama"), tmp_path / "out", reshard.plan_memory(tiny("llama"), "1x1:80GB"), tp=2)
    assert "plan_memory" in dir(reshard)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = reshard.nothing
