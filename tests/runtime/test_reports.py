"""What a run leaves for people, CI and browsers: the verdict first, every check, and no stranger's markup."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

import reshard
from runtime import verbs
from runtime.checking.checks import Check
from runtime.junit import junit, junit_error
from runtime.report_html.page import make_page, page_data
from runtime.request import RunOptions
from runtime.result import RunResult
from runtime.summary import first_operator, verdict, worst_layer
from shard_plans.errors import OutputError, RuntimeFault
from tests.conftest import MakeCheckpoint
from tests.tools import tamper
from tests.tools.browser import CHROMIUM, examine
from tests.tools.cli import RunCli
from tests.tools.sharded import convert_tiny

HOSTILE = "</script><img src=x onerror=faults.push('ran')>\x00\x1b[31m]]>&\ud800"
EXPERTS = ("stage-0-ep-0-etp-0.safetensors", "stage-0-ep-1-etp-0.safetensors")
JENKINS = {
    "testsuites": ("name time tests failures errors", "testsuite"),
    "testsuite": (
        "name tests failures errors group time skipped timestamp hostname id package file log url",
        "testsuite properties testcase system-out system-err",
    ),
    "testcase": ("name time classname group", "skipped error failure system-out system-err"),
    "properties": ("", "property"), "property": ("name value", ""), "system-out": ("", ""),
    "failure": ("type message", ""), "error": ("type message", ""),
}  # fmt: skip
"""Attributes and children of each element, by the schema junit-10 of Jenkins' xUnit plugin."""
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")


@pytest.fixture(scope="module")
def output(tiny: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("reports") / "out"
    convert_tiny(tiny("mixtral"), out, {"tp": 2, "ep": 2})
    return out


@pytest.fixture(scope="module")
def right(output: Path, tiny: MakeCheckpoint) -> RunResult:
    return reshard.verify_and_run(output, tiny("mixtral"), max_new_tokens=3)


@pytest.fixture(scope="module")
def wrong(output: Path, tiny: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    out = tmp_path_factory.mktemp("wrong") / "out"
    convert_tiny(tiny("mixtral"), out, {"tp": 2, "ep": 2})
    for file in EXPERTS:
        tamper.swap_experts(out, file, "layers.1.experts.down")
    return reshard.verify_and_run(out, tiny("mixtral"), sensitivity=True)


def hostile(result: RunResult) -> RunResult:
    """The same with text that a stranger chose."""
    checks = (*result.checks, Check(HOSTILE, False, None, 0.0, HOSTILE, HOSTILE))
    return replace(
        result, passed=False, checks=checks, not_checked=(HOSTILE,), text=HOSTILE,
        figures={**result.figures, "family": HOSTILE, "device": HOSTILE},
    )  # fmt: skip


def test_the_verdict_comes_first(right: RunResult, wrong: RunResult, output: Path, run_cli: RunCli) -> None:
    assert verdict(right).startswith("passed: ") and "worst layer" in verdict(right)
    assert verdict(wrong).startswith("FAILED: ") and "worst layer 1 " in verdict(wrong)
    assert "first wrong in experts" in verdict(wrong) and "layers" in verdict(wrong)
    worst = worst_layer(wrong)
    assert worst is not None and first_operator(wrong, worst) == "experts"
    assert run_cli("verify-and-run", output).stdout.startswith("passed: 1 check\n")


def test_a_layer_that_is_no_number_is_the_worst(right: RunResult) -> None:
    layers = list(right.layers)
    layers[2] = replace(layers[2], alone=float("nan"), operators={"attn": float("nan")})
    result = replace(right, layers=tuple(layers))
    assert "worst layer 2 " in verdict(result) and "first wrong in attn" in verdict(result)
    assert json.loads(json.dumps(result.as_dict(), allow_nan=False))["layers"][2]["alone"] is None


def test_a_layer_with_a_wrong_operator_is_the_worst_even_if_it_came_out_right(right: RunResult) -> None:
    layers = [replace(layer, operators=dict(layer.operators)) for layer in right.layers]
    layers[0].operators["router"] = 0.1
    assert worst_layer(replace(right, layers=tuple(layers))) is layers[0]


def test_speed_memory_and_time_are_told(right: RunResult) -> None:
    figures = right.figures
    assert figures["first_token_seconds"] > 0 and figures["token_seconds"] > 0 and figures["peak_memory"] > 1 << 20
    assert figures["tokens_per_second"] == pytest.approx(1 / figures["token_seconds"], rel=0.01)
    assert figures["seconds_computing"] > 0 and figures["seconds_comparing"] > 0
    assert {(span.rank, span.section) for span in right.timeline} >= {
        (rank, layer) for rank in (0, 1) for layer in range(3)
    }
    assert all(0 <= span.asked <= span.got <= span.ran <= span.done for span in right.timeline)
    assert all(sum(layer.load or ()) == figures["tokens"] * 2 for layer in right.layers)


def test_junit_has_a_case_for_each_check(right: RunResult, wrong: RunResult) -> None:
    for result in (right, wrong):
        root = ElementTree.fromstring(junit(result).encode())
        suite = root[0]
        cases = {case.get("name"): case for case in suite.findall("testcase")}
        assert list(cases) == [check.name for check in result.checks]
        failed = {name for name, case in cases.items() if case.find("failure") is not None}
        assert failed == {check.name for check in result.checks if not check.passed}
        for element in (root, suite):
            assert (element.get("tests"), element.get("failures")) == (str(len(cases)), str(len(failed)))
    failure = cases["operators"].find("failure")
    assert failure is not None and "layer 1" in (failure.get("message") or "") and "experts" in (failure.text or "")
    assert "Not checked:" in (suite.findtext("system-out") or "")


def test_junit_keeps_to_what_ci_systems_read(right: RunResult, wrong: RunResult) -> None:
    documents = [junit(result) for result in (right, wrong, hostile(wrong))] + [junit_error("kind", HOSTILE)]
    for root in (ElementTree.fromstring(document.encode()) for document in documents):
        assert root.tag == "testsuites" and [child.tag for child in root] == ["testsuite"]
        for element in root.iter():
            attributes, children = JENKINS[element.tag]
            assert set(element.keys()) <= set(attributes.split()), element.tag
            assert {child.tag for child in element} <= set(children.split()), element.tag


def test_a_run_that_cannot_be_made_is_an_error_in_junit(output: Path, tmp_path: Path, run_cli: RunCli) -> None:
    path = tmp_path / "junit.xml"
    path.write_text("<testsuites/>")  # of a run before, which passed
    run_cli("verify-and-run", output, "--input-ids", "1,99999", "--junit", path, code=2)
    root = ElementTree.parse(path).getroot()
    error = root.find("testsuite/testcase/error")
    assert error is not None and "99999" in (error.get("message") or "") and root.get("errors") == "1"


def test_a_run_that_is_ended_by_force_leaves_no_old_verdict(
    output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "junit.xml"
    reshard.verify_and_run(output, junit=path)
    assert ElementTree.parse(path).getroot().get("errors") == "0"

    def killed(options: RunOptions) -> RunResult:
        raise KeyboardInterrupt

    monkeypatch.setattr(verbs, "run", killed)
    with pytest.raises(KeyboardInterrupt):
        reshard.verify_and_run(output, junit=path)
    error = ElementTree.parse(path).getroot().find("testsuite/testcase/error")
    assert error is not None and "didn't come to its end" in (error.get("message") or "")


def test_reports_are_not_written_into_what_is_read(output: Path, tmp_path: Path) -> None:
    for word in ("html", "junit"):
        with pytest.raises(OutputError, match="which is only read"):
            reshard.verify_and_run(output, **{word: output / "report"})  # type: ignore[arg-type]
        with pytest.raises(OutputError, match="isn't there"):
            reshard.verify_and_run(output, **{word: tmp_path / "no" / "report"})  # type: ignore[arg-type]
    assert not (output / "report").exists()
    with pytest.raises(RuntimeFault):
        reshard.verify_and_run(output, compute="int3", html=tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []


def test_the_page_needs_nothing_else_and_strangers_stay_text(right: RunResult, output: Path, tmp_path: Path) -> None:
    for page in (make_page(right), make_page(hostile(right))):
        assert "@@" not in page and "Content-Security-Policy" in page and "<img" not in page
        assert not re.search(r"<(link|iframe|script src|object)|@import|url\(", page)
        assert set(re.findall(r"https?://[^\"' ]*", page)) == {"http://www.w3.org/2000/svg"}
        assert page.index('id="verdict"') < page.index('id="checks"')
    root = ElementTree.fromstring(junit(hostile(right)).encode())
    assert "<img src=x" in (root.findtext("testsuite/system-out") or "")
    assert page_data(right)["verdict"] == verdict(right)
    reshard.verify_and_run(output, html=tmp_path / "page.html", junit=tmp_path / "junit.xml")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["junit.xml", "page.html"]


SEEN = """(() => {
  const text = (id) => document.getElementById(id).textContent;
  const rows = (id) => document.querySelectorAll(`#${id} tbody tr`).length;
  const canvas = document.querySelector("#heat canvas");
  return {
    verdict: text("verdict"), sort: document.getElementById("verdict").className, checks: rows("checks"),
    layers: rows("layers-table"), bars: document.querySelectorAll("#layers rect").length, margins: rows("margins"),
    canvas: canvas && [canvas.width, canvas.height], spans: document.querySelectorAll("#timeline rect").length,
    texts: rows("texts"), costs: rows("sensitivity"),
    told: text("load-told"), unchecked: document.querySelectorAll("#unchecked li").length,
    images: document.images.length, over: document.documentElement.scrollWidth - window.innerWidth,
  };
})()"""


@in_a_browser
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (420, True)])
def test_in_a_browser(wrong: RunResult, tmp_path: Path, width: int, dark: bool) -> None:
    seen = examine(make_page(hostile(wrong)), SEEN, tmp_path, width, dark)
    assert seen["faults"] == [] and seen["images"] == 0 and seen["over"] <= 0
    assert seen["verdict"].startswith("FAILED") and seen["sort"] == "no"
    assert seen["checks"] == len(wrong.checks) + 1 and seen["layers"] == seen["margins"] == 3
    assert seen["bars"] == 9 and seen["canvas"][1] % 3 == 0 and seen["spans"] > 10
    assert "choices" in seen["told"] and seen["unchecked"] == 1 and seen["texts"] == 1
    assert seen["costs"] == len(wrong.sensitivity) == 8


@in_a_browser
def test_without_a_reference_or_experts(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    convert_tiny(tiny("llama"), tmp_path / "out", {"tp": 1})
    seen = examine(make_page(reshard.verify_and_run(tmp_path / "out")), SEEN, tmp_path)
    assert seen["faults"] == [] and seen["sort"] == "yes" and seen["layers"] == 0 and seen["canvas"] is None


def test_reports_are_written_apart_and_in_the_place_of_files(
    output: Path, tiny: MakeCheckpoint, run_cli: RunCli, tmp_path: Path
) -> None:
    fifo, junit_file = tmp_path / "fifo", tmp_path / "verify.xml"
    os.mkfifo(fifo)
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(tiny("mixtral"), checkpoint)
    before = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    common = ("verify-and-run", output, "--reference", checkpoint, "--json")
    for option in ("--html", "--logits-out", "--junit"):
        for name, words in ((fifo, "isn't a file"), (tmp_path, "isn't a file"), (checkpoint / "config.json", "read")):
            ran = run_cli(*common, option, name, code=2)
            assert words in ran.json["error"]["message"] and fifo.is_fifo()
    ran = run_cli(*common, "--html", junit_file, "--junit", junit_file, code=2)
    assert "both name" in ran.json["error"]["message"]
    assert {path.name: path.read_bytes() for path in checkpoint.iterdir()} == before
    junit_file.write_text("old")
    run_cli(*common, "--html", fifo, "--junit", junit_file, code=2)
    assert ElementTree.parse(junit_file).find(".//error") is not None


def test_contradicting_sources_leave_an_error_in_the_report(output: Path, run_cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / "verify.xml").write_text("old")
    sources = ("--prompt", "x", "--input-ids", "1")
    ran = run_cli("verify-and-run", output, *sources, "--junit", tmp_path / "verify.xml", "--json", code=2)
    assert "--prompt contradicts --input-ids" in ran.json["error"]["message"]
    assert ElementTree.parse(tmp_path / "verify.xml").find(".//error") is not None
