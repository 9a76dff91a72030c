"""plan-memory's report of the search, for people and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import MakeCheckpoint
from tests.tools.cli import RunCli

SMALL = ("--context", 64, "--concurrency", 16, "--prefill-chunk", 64)


def test_json_says_what_was_found(tiny: MakeCheckpoint, run_cli: RunCli) -> None:
    found = run_cli("plan-memory", tiny("mixtral"), "--cluster", "2x4:h100", *SMALL, "--json").json
    assert found["goal"] == "throughput" and found["cluster"]["card"] == "h100"
    prediction = found["prediction"]
    assert prediction["decode_tokens"] == pytest.approx(16 / prediction["decode_step"])
    assert len(found["alternatives"]) == 5
    for other in found["alternatives"]:
        assert other["parallel"] != found["parallel"] and other["room"] > 0 and "tokens/s" in other["trades"]
    assert sum(group["grids"] for group in found["rejected"]) == found["grids"] - 1
    assert {group["reason"] for group in found["rejected"]} == {"speed", "nodes"}
    assert found["remedies"] == [] and any("NVIDIA H100 data sheet" in line for line in found["assumptions"])
    assert found["workload"]["concurrency"] == 16


def test_text_says_it_too(tiny: MakeCheckpoint, run_cli: RunCli) -> None:
    text = run_cli("plan-memory", tiny("mixtral"), "--cluster", "2x4:80GB", *SMALL).stdout
    for words in ("predicted: decode", "next best", "are no better", "--explain says more", "| may be used", "WK"):
        assert words in text
    assert "assumes" not in text
    explained = run_cli("plan-memory", tiny("mixtral"), "--cluster", "2x4:80GB", *SMALL, "--explain").stdout
    assert "the prediction assumes:" in explained and "at most" in explained
    assert "assumed because nothing is published" in explained  # a card given as a size


def test_what_does_not_fit_says_what_would(tiny: MakeCheckpoint, run_cli: RunCli) -> None:
    ran = run_cli("plan-memory", tiny("mixtral"), "--cluster", "1x2:1MB", *SMALL, code=1)
    assert "does not fit" in ran.stdout and "what would fit, or not:" in ran.stdout
    found = run_cli("plan-memory", tiny("mixtral"), "--cluster", "1x2:1MB", *SMALL, "--json", code=1).json
    kinds = {remedy["kind"] for remedy in found["remedies"]}
    assert {"cards", "context", "concurrency", "kv_dtype", "offload"} <= kinds and found["prediction"] is None


def test_the_text_says_what_was_planned_for(tiny: MakeCheckpoint, run_cli: RunCli) -> None:
    at = ("plan-memory", tiny("llama"), "--cluster", "1x4:h100", *SMALL[2:], "--prefix", 32, "--goal")
    text = run_cli(*at, "context").stdout
    told = "for 16 sequences of 256 tokens, 32 of them shared, KV cache bf16, engine reshard on 1x4:h100"
    assert told in text.splitlines()
    assert "replicas have no sequence" not in text
    idle = run_cli("plan-memory", tiny("llama"), "--cluster", "1x4:h100", "--dp", 4, "--concurrency", 3).stdout
    assert "1 of 4 replicas have no sequence: give --concurrency more, or fewer cards" in idle
    assert "on 1x1:h100" in run_cli(*at, "fewest-cards").stdout


def test_no_figure_is_cut_short(tiny: MakeCheckpoint, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    at = ("plan-memory", tiny("mixtral"), "--cluster", "2x4:h100", *SMALL, "--by", "operator")
    found = run_cli(*at, "--json").json
    text = run_cli(*at).stdout
    assert "…" not in text and "device context and libraries" in text
    for line in found["lines"]:
        assert f"{line['typical']:,}" in text


@pytest.mark.parametrize("goal", ["latency", "context", "fewest-cards"])
def test_goals(tiny: MakeCheckpoint, run_cli: RunCli, goal: str) -> None:
    load = SMALL if goal != "context" else SMALL[2:]
    found = run_cli("plan-memory", tiny("llama"), "--cluster", "1x4:h100", *load, "--goal", goal, "--json").json
    assert found["goal"] == goal and found["fits"]
    if goal == "context":
        assert found["workload"]["context"] == 256
    if goal == "fewest-cards":
        assert found["parallel"]["world"] == 1 == found["cluster"]["cards"]


def test_a_given_plan_is_predicted(tiny: MakeCheckpoint, run_cli: RunCli, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    first = run_cli("plan-memory", tiny("llama"), "--cluster", "1x4:h100", *SMALL, "-o", plan, "--json").json
    again = run_cli("plan-memory", tiny("llama"), "--plan", plan, "--json").json
    assert again["goal"] == "given" and again["prediction"] == first["prediction"]
    ran = run_cli("plan-memory", tiny("llama"), "--plan", plan, "--cluster", "1x4:1MB", code=1)
    assert "without --plan, plan-memory searches" in ran.stderr
    ran = run_cli("plan-memory", tiny("llama"), "--plan", plan, "--goal", "latency", code=2)
    assert "--plan contradicts --goal" in ran.stderr


def test_loads_and_clusters_from_files(tiny: MakeCheckpoint, run_cli: RunCli, tmp_path: Path) -> None:
    experts = 8
    load, cluster = tmp_path / "load.json", tmp_path / "mine.yaml"
    cluster.write_text("reshard_cluster: 1\nnodes: 1\ncards: 4\ncard: mine\nmemory: 80GB\nbandwidth: 3000\n")
    config = json.loads((tiny("mixtral") / "config.json").read_text())
    experts = config["num_local_experts"]
    load.write_text(json.dumps({"0": [100] + [1] * (experts - 1)}))
    arguments = ("plan-memory", tiny("mixtral"), "--cluster", cluster, *SMALL, "--ep", 4, "--expert-load", load)
    found = run_cli(*arguments, "--json").json
    assert found["experts"]["imbalance"] >= 1 and found["cluster"]["card"] == "mine"
    assert "experts dealt by load" in run_cli(*arguments).stdout
    load.write_text(json.dumps({"0": [1, 2, 3]}))
    ran = run_cli(*arguments, code=2)
    assert f"layer 0 has 3 counts, the model has {experts} experts" in ran.stderr and ran.stderr.count("\n") == 1
    ran = run_cli("plan-memory", tiny("mixtral"), "--cluster", "1x4:80GB", "--redundant-experts", 4, code=2)
    assert "only a load file" in ran.stderr
    cluster.write_text("reshard_cluster: 1\nnodes: 1\ncards: 4\ncard: mine\nmemory: 0GB\n")
    ran = run_cli("plan-memory", tiny("mixtral"), "--cluster", cluster, code=2)
    assert "give a size" in ran.stderr and ran.stderr.count("\n") == 1


def test_other_formats_are_counted_and_timed(tiny: MakeCheckpoint, run_cli: RunCli) -> None:
    at = ("--cluster", "1x2:h100", "--tp", 1, "--pp", 1, "--ep", 2, "--concurrency", 256, "--json")
    stored, wide = (
        run_cli("plan-memory", tiny("mixtral"), *at, *weights).json for weights in ((), ("--weights", "experts=fp32"))
    )
    assert wide["ranks"][0]["weights"] > stored["ranks"][0]["weights"]
    assert wide["prediction"]["decode_step"] >= stored["prediction"]["decode_step"]
