"""The ledger's lines: they add up to its rows, whatever they are summed by; engines change what their rules say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shard_plans.documents.plan import Workload, format_plan, parse_plan
from shard_plans.errors import PlanError
from shard_plans.memory.amount import Amount, total
from shard_plans.memory.cluster import parse_cluster
from shard_plans.memory.count import grouped, ledger, rank_items, with_ledger
from shard_plans.memory.engine import FOLDER, load_engine
from shard_plans.memory.needs import stage_items
from shard_plans.memory.payload import Payload
from shard_plans.report import counted
from tests.conftest import MakeCheckpoint
from tests.tools.cli import RunCli
from tests.tools.converted import bound
from tests.tools.plans import make_plan


@pytest.mark.parametrize("engine", ["reshard", "vllm", "vllm@0.7.2", "sglang"])
@pytest.mark.parametrize("sizes", [{}, {"tp": 2, "pp": 2}, {"dp": 2, "tp": 2, "ep": 4}, {"tp": 4, "ep": 2, "etp": 2}])
@pytest.mark.parametrize("family", ["deepseek_v3_mtp", "qwen3_moe_fp8", "qwen2"])
def test_lines_add_up_to_rows(tiny: MakeCheckpoint, family: str, sizes: dict[str, int], engine: str) -> None:
    binding = bound(tiny(family))
    if sizes.get("ep", 1) > 1 and not binding.model.sizes.get("experts"):
        return
    plan = replace(make_plan(binding, sizes), workload=Workload(64, 4, engine=engine), cluster=parse_cluster("1x8:2GB"))
    payload = Payload(binding)
    for row in ledger(payload, plan):
        items = rank_items(payload, plan, row.rank)
        whole = total(item.amount for item in items)
        assert (whole.low, whole.typical, whole.high) == (row.low, row.typical, row.high)
        for name in ("weights", "kv_cache", "activations", "communication", "runtime"):
            part = total(item.amount for item in items if item.component == name)
            assert part.high == getattr(row, name)
        for by in ("stage", "layer", "operator"):
            assert total(item.amount for item in grouped(items, by)) == whole
        assert {item.layer for item in grouped(items, "layer")} - {None} == set(range(*plan.stages[row.stage]))


def test_engines_leave_out_layers_that_only_drafting_needs(tiny: MakeCheckpoint) -> None:
    binding = bound(tiny("deepseek_v3_mtp"))
    keep, drop = make_plan(binding), make_plan(binding, mtp="drop")
    load = Workload(64, 4, engine="vllm")
    weights = [ledger(Payload(binding), replace(plan, workload=load))[0].weights for plan in (keep, drop)]
    assert weights[0] == weights[1] < ledger(Payload(binding), keep)[0].weights


def test_the_fits_answer_follows_the_end_and_the_utilization(tiny: MakeCheckpoint) -> None:
    binding = bound(tiny("llama"))
    base = replace(make_plan(binding), cluster=parse_cluster("1x1:4GB"), workload=Workload(64, 1))
    row = (with_ledger(base, binding).ledger or ())[0]
    assert row.low < row.typical < row.high == row.total and row.limit == 34 * 10**8
    card = parse_cluster(f"1x1:{row.typical // 10**6 + 1}MB")
    at = {end: with_ledger(replace(base, cluster=card, workload=Workload(64, 1, utilization=1.0, assume=end)), binding)
          for end in ("low", "typical", "high")}  # fmt: skip
    assert [at[end].fits for end in ("low", "typical", "high")] == [True, True, False]
    tight = replace(at["typical"], workload=Workload(64, 1, utilization=0.5, assume="typical"))
    assert with_ledger(tight, binding).fits is False


def test_the_verdict_says_which_end_it_took(tiny: MakeCheckpoint) -> None:
    binding = bound(tiny("llama"))
    base = replace(make_plan(binding), workload=Workload(64, 1, utilization=1.0))
    row = (with_ledger(base, binding).ledger or ())[0]

    def words(memory: int, assume: str) -> str:
        load = replace(base.workload, assume=assume)
        return counted(with_ledger(replace(base, cluster=parse_cluster(f"1x1:{memory}KB"), workload=load), binding))

    roomy, tight = row.high // 1000 + 1, row.typical // 1000 + 1
    assert words(roomy, "high") == "counted at the high end of what can't be computed"
    assert words(tight, "high").endswith("; at the low and the typical end it fits")
    assert words(tight, "typical").endswith(
        "at the typical end of what can't be computed; at the high end it doesn't fit"
    )


def test_a_workload_is_kept_in_the_plan(tiny: MakeCheckpoint) -> None:
    load = Workload(64, 4, "fp4", 32, 16, 8, "deepep_low_latency", "vllm@0.8.5", 0.9, "typical")
    plan = replace(make_plan(bound(tiny("llama"))), workload=load)
    assert parse_plan(format_plan(plan)).workload == load


@pytest.mark.parametrize(
    ("load", "message"),
    [
        ({"engine": "llama"}, "engine 'llama' is unknown; allowed: reshard, vllm, sglang"),
        ({"utilization": 0}, "above 0 and up to 1"),
        ({"utilization": 1.5}, "above 0 and up to 1"),
        ({"prefix": 9000}, "longer than the context"),
        ({"assume": "best"}, "allowed: low, typical, high"),
        ({"dispatch": "pigeon"}, "allowed: all_to_all"),
        ({"image_tokens": -1}, "0 to"),
    ],
)
def test_workloads_that_make_no_sense(load: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Workload(**load)  # type: ignore[arg-type]


def test_versions_choose_among_an_engine_s_rules() -> None:
    assert load_engine("vllm@0.7.2").value("mla_copies") == "products"
    assert load_engine("vllm@0.8").value("mla_copies") == load_engine("vllm").value("mla_copies") == "dequantised"
    assert load_engine("vllm").range("nothing") == Amount(0, 0, 0)
    for name in ("reshard", "vllm", "sglang"):
        assert all(rule.source for rule in load_engine(name).rules.values())
    with pytest.raises(PlanError, match="isn't a version"):
        load_engine("vllm@latest")


@pytest.mark.parametrize("by", ["stage", "layer", "operator"])
def test_the_command_shows_the_lines(tiny: MakeCheckpoint, run_cli: RunCli, by: str) -> None:
    words = ("plan-memory", tiny("mixtral"), "--cluster", "1x2:8GB", "--tp", 2, "--by", by)
    found = run_cli(*words, "--json").json
    assert found["by"] == by and sum(line["high"] for line in found["lines"]) == found["ranks"][0]["high"]
    assert "weights" in run_cli(*words).stdout
    ranges = {line["operator"] for line in found["lines"] if line["source"]}
    assert ranges == ({"device context and libraries", "fragmentation"} if by == "operator" else set())
    assert all(line["source"] for line in found["lines"] if by == "operator" and line["low"] < line["high"])


def test_every_range_has_its_source(tiny: MakeCheckpoint) -> None:
    for engine in ("reshard", "vllm", "sglang"):
        binding = bound(tiny("deepseek_v4"))
        plan = replace(make_plan(binding), workload=Workload(64, 4, engine=engine))
        ranges = [item for item in grouped(rank_items(Payload(binding), plan, 0), "operator") if item.source]
        assert "compressed keys and values" in {item.operator for item in ranges}
        items = rank_items(Payload(binding), plan, 0)
        assert all(bool(item.source) for item in items if item.amount.low < item.amount.high)


def test_every_rule_is_used_by_some_code() -> None:
    """A rule that no code reads would be a claim that changes nothing."""
    folder = FOLDER.parent
    code = "".join(path.read_text() for path in folder.glob("*.py"))
    for name in ("reshard", "vllm", "vllm@0.7", "sglang", "sglang@0.4.6"):
        for rule in load_engine(name).rules:
            assert f'"{rule}"' in code, rule


def test_engines_that_sample_while_they_measure(tiny: MakeCheckpoint) -> None:
    binding = bound(tiny("llama"))
    vocab = binding.model.sizes["vocab"]
    for engine, low in (("vllm", 6 * 256 * vocab), ("sglang", 4 * vocab)):
        items = stage_items(binding.model, make_plan(binding).grid, Workload(64, 1, engine=engine), 0, (0, 1))
        assert next(item.amount.low for item in items if item.operator == "logits") == low
