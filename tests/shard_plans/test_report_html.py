"""The HTML report: one file that needs nothing else, in a browser: light and dark, wide and narrow, hostile names."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shard_plans.errors import OutputError
from shard_plans.families.binding import Binding
from shard_plans.memory.cluster import parse_cluster
from shard_plans.memory.workload import Workload
from shard_plans.report_html.curves import curves
from shard_plans.report_html.data import page_data
from shard_plans.report_html.page import make_page, script_safe, write_page
from shard_plans.search.expert_load import ExpertLoad
from shard_plans.search.found import Found
from shard_plans.search.search import explore
from tests.conftest import MakeCheckpoint
from tests.tools.browser import CHROMIUM, examine
from tests.tools.cli import RunCli
from tests.tools.converted import bound

LOAD = Workload(64, 16, prefill_chunk=64)
HOSTILE = "</script><img src=x onerror=faults.push('ran')><!-- \u2028 & '\""
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")


@pytest.fixture
def moe(tiny: MakeCheckpoint) -> tuple[Binding, Found]:
    binding = bound(tiny("mixtral"))
    experts = binding.model.sizes["experts"]
    hot = ExpertLoad({0: (1000.0, *[1.0] * (experts - 1))})
    sizes = {"tp": 1, "dp": 4, "pp": 2, "ep": 4, "etp": 1}
    return binding, explore(binding, parse_cluster("2x4:h100"), sizes, LOAD, expert_load=hot, redundant=4)


def test_the_page_needs_nothing_else(moe: tuple[Binding, Found]) -> None:
    page = make_page(page_data(*moe))
    assert "@@" not in page and "Content-Security-Policy" in page
    assert not re.search(r"<(img|link|iframe|script src|object)|@import|url\(", page)
    assert set(re.findall(r"https?://[^\"' ]*", page)) == {"http://www.w3.org/2000/svg"}


def test_names_cannot_leave_the_data() -> None:
    data = {"name": HOSTILE, "list": ["<!--<script>", "]]>"]}
    text = script_safe(data)
    assert json.loads(text) == data and not set("<>&\u2028") & set(text)


def test_the_data_are_those_of_the_plan(moe: tuple[Binding, Found]) -> None:
    binding, found = moe
    data = page_data(binding, found)
    assert found.plan.ledger is not None and len(data["ranks"]) == 8
    fullest = {stage: max(row.total for row in found.plan.ledger if row.stage == stage) for stage in (0, 1)}
    for stage, total in fullest.items():
        assert sum(line["high"] for line in data["operators"] if line["stage"] == stage) == total
    placed = data["experts_by_slot"]
    assert placed["count"] == binding.model.sizes["experts"] and len(placed["placements"]) == 2
    assert [layer for layer, _ in placed["layers"]] == [layer.index for layer in binding.model.layers]


def test_other_formats_are_those_of_the_plan(moe: tuple[Binding, Found]) -> None:
    binding, _ = moe
    found = explore(binding, parse_cluster("1x2:h100"), {"tp": 1, "ep": 2}, LOAD, weights={"experts": "fp32"})
    assert found.plan.ledger is not None
    data = page_data(binding, found)
    held = sum(line["high"] for line in data["operators"] if line["component"] == "weights" and line["stage"] == 0)
    assert held == found.plan.ledger[0].weights and data["weights"] == {"experts": "fp32"}
    assert all(line["source"] for line in data["operators"] if line["low"] < line["high"])


@pytest.mark.parametrize("family", ["llama", "deepseek_v3_mtp"])
def test_curves_go_through_the_plan_and_meet_the_limit(tiny: MakeCheckpoint, family: str) -> None:
    binding = bound(tiny(family))
    load = replace(LOAD, concurrency=1 << 14, utilization=1.0)
    plan = explore(binding, parse_cluster("1x2:h100"), workload=load).plan
    assert plan.ledger is not None and plan.cluster is not None
    tight = max(row.total for row in plan.ledger) + 10**6
    cluster = replace(plan.cluster, card=replace(plan.cluster.card, memory=tight))
    plan = explore(binding, cluster, {"tp": plan.grid.tp, "pp": plan.grid.pp}, load).plan
    assert plan.ledger is not None
    for curve in curves(binding.model, plan):
        here = next(point for point in curve.points if point.value == curve.now)
        assert here.high == max(row.total for row in plan.ledger)
        assert here.low == max(row.low for row in plan.ledger)
        assert [point.value for point in curve.points] == sorted({point.value for point in curve.points})
        assert all(point.low <= point.typical <= point.high for point in curve.points)
        assert all((point.high <= tight) == (point.value <= curve.edge) for point in curve.points)
        assert curve.now <= curve.edge <= curve.limit


def test_the_command_writes_it(tiny: MakeCheckpoint, run_cli: RunCli, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    run_cli("plan-memory", tiny("llama"), "--cluster", "1x2:h100", "--context", 64, "--html", out)
    assert "llama on 2 cards" in out.read_text() and not list(tmp_path.glob("*.partial"))
    ran = run_cli("plan-memory", tiny("llama"), "--cluster", "1x2:h100", "--html", tmp_path / "no" / "r.html", code=2)
    assert "can't be written" in ran.stderr
    with pytest.raises(OutputError):
        write_page(*_found(bound(tiny("llama"))), tmp_path)


def _found(binding: Binding) -> tuple[Binding, Found]:
    return binding, explore(binding, parse_cluster("1x2:h100"), workload=LOAD)


SEEN = """(() => {
  const text = (id) => document.getElementById(id).textContent;
  const rows = (id) => document.querySelectorAll(`#${id} tbody tr`).length;
  const find = document.getElementById("find");
  const all = rows("operators");
  find.value = "weights experts"; find.dispatchEvent(new Event("input"));
  const some = rows("operators"), told = text("found");
  find.value = "<b>nothing"; find.dispatchEvent(new Event("input"));
  const none = rows("operators");
  find.value = ""; find.dispatchEvent(new Event("input"));
  const heads = [...document.querySelectorAll("#operators th button")];
  const lines = () => [...document.querySelectorAll("#operators tbody tr")];
  const column = (at) => lines().map((row) => row.children[at].textContent);
  heads[3].click();
  const names = column(3);
  heads[5].click();
  const sizes = column(5).map((cell) => Number(cell.replaceAll(",", "")));
  const picker = document.getElementById("layer");
  const first = text("experts-told");
  picker.selectedIndex = picker.options.length - 1;
  picker.dispatchEvent(new Event("change"));
  const canvas = document.querySelector("#experts canvas");
  const before = getComputedStyle(document.body).backgroundColor;
  document.getElementById("theme").click();
  const after = getComputedStyle(document.body).backgroundColor;
  return {
    rects: document.querySelectorAll("#bars rect").length, limits: document.querySelectorAll("svg .limit").length,
    charts: document.querySelectorAll("#curves svg").length, all, some, told, none, names, sizes, first,
    last: text("experts-told"), canvas: canvas && [canvas.width, canvas.height], verdict: text("verdict"),
    summary: text("summary"), sources: text("sources"),
    others: rows("alternatives"), remedies: text("remedies"), images: document.images.length, before, after,
    over: document.documentElement.scrollWidth - window.innerWidth, fits: document.getElementById("verdict").className,
  };
})()"""


@in_a_browser
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (420, True)])
def test_in_a_browser(moe: tuple[Binding, Found], tmp_path: Path, width: int, dark: bool) -> None:
    data = page_data(*moe)
    seen = examine(make_page(data), SEEN, tmp_path, width, dark)
    assert seen["faults"] == [] and seen["images"] == 0
    assert seen["rects"] == 8 * len(data["parts"]) and seen["charts"] == 2 and seen["limits"] == 3
    wanted = [line for line in data["operators"] if line["component"] == "weights" and "experts" in line["operator"]]
    assert seen["all"] == len(data["operators"]) and seen["some"] == len(wanted) > 0 and seen["none"] == 0
    assert seen["told"].startswith(f"{len(wanted)} of {len(data['operators'])} lines")
    assert seen["names"] == sorted(seen["names"], key=str.lower) and seen["sizes"] == sorted(seen["sizes"])[::-1]
    assert "redundant copies" in seen["first"] and "redundant" not in seen["last"]  # only layer 0 was dealt by load
    assert "ranks 4 to 7" in seen["last"] and seen["canvas"][0] % data["experts_by_slot"]["count"] == 0
    assert seen["fits"] == "yes" and "Fits" in seen["verdict"] and "precision" not in seen["summary"]
    assert "fragmentation: two boots" in seen["sources"]
    assert seen["over"] <= 0  # nothing makes the page itself scroll sideways
    light, night = ("rgb(255, 255, 255)", "rgb(20, 23, 26)")
    assert (seen["before"], seen["after"]) == ((night, light) if dark else (light, night))


@in_a_browser
def test_hostile_names_stay_text(moe: tuple[Binding, Found], tmp_path: Path) -> None:
    data: dict[str, Any] = page_data(*moe)
    data["model"]["family"] = data["cluster"]["card"] = data["operators"][0]["operator"] = HOSTILE
    data["rejected"] = [{"tp": 1, "pp": 1, "grids": 1, "reason": "cut", "detail": HOSTILE}]
    data["remedies"] = [{"kind": HOSTILE, "text": HOSTILE, "value": None}]
    data["assumptions"] = [HOSTILE]
    data["weights"] = {HOSTILE: HOSTILE}
    data["operators"][1]["source"] = HOSTILE
    data["alternatives"] = []
    seen = examine(make_page(data), SEEN, tmp_path)
    assert seen["faults"] == [] and seen["images"] == 0 and HOSTILE in seen["remedies"]
    assert f"In another precision: {HOSTILE} as {HOSTILE}." in seen["summary"] and HOSTILE in seen["sources"]


@in_a_browser
def test_what_does_not_fit_and_what_has_no_experts(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    binding = bound(tiny("llama"))
    found = explore(binding, parse_cluster("1x2:1MB"), workload=LOAD)
    seen = examine(make_page(page_data(binding, found)), SEEN, tmp_path)
    assert seen["faults"] == [] and seen["fits"] == "no" and "too much" in seen["verdict"]
    assert seen["canvas"] is None and "What would fit" in seen["remedies"]
