"""The targets that the planner is held to, row by row, and that the page says what the script would write."""

from __future__ import annotations

import pytest

from tests.accuracy.planned import Score, cases, rows, score
from tests.accuracy.score import DOCUMENT, document

HELD = [(row, what) for row, case in cases().items() for what in case.get("target", {})]
WEIGHTS = {
    "gt001",
    "gt020",
    "gt023",
    "gt043",
    "gt066",
    "gt068",
    "gt073",
    "gt075",
    "gt076",
    "gt082",
    "gx001",
    "gx002",
    "gx003",
}


def scored(row: str, **changes: object) -> dict[str, Score]:
    return {each.what: each for each in score(rows()[row], {**cases()[row], **changes})}


@pytest.mark.parametrize(("row", "what"), HELD)
def test_a_figure_is_within_its_target(row: str, what: str) -> None:
    found = scored(row)[what]
    assert found.target is not None and abs(found.error) <= found.target


def test_every_row_is_scored_or_says_why_not() -> None:
    assert list(cases()) == list(rows())
    for case in cases().values():
        assert ("why" in case) != ("config" in case)
    assert {row for row, what in HELD if what == "weights"} == WEIGHTS


@pytest.mark.parametrize(("row", "least"), [("gt001", 5), ("gt043", 2), ("gt020", 2)])
def test_without_the_engine_s_rule_it_would_miss(row: str, least: float) -> None:
    other = "sglang" if row == "gt020" else "reshard"
    assert scored(row, engine=other)["weights"].error < -least


@pytest.mark.parametrize(
    ("row", "change"), [("gt005", {"tp": 1}), ("gt009", {"kv_dtype": "fp8"}), ("gt068", {"engine": "vllm"})]
)
def test_a_wrong_assumption_would_show(row: str, change: dict[str, object]) -> None:
    assert abs(scored(row, **change)["tokens"].error) > 20


def test_the_page_is_what_the_script_writes() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == document(), "run python -m tests.accuracy.score"
