"""Plan documents: they read back the same, can be edited by hand, and hostile ones are refused with a line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shard_plans.documents.plan import (
    Plan,
    PlanSource,
    Workload,
    format_plan,
    parse_plan,
    plan_digest,
    read_plan,
    write_plan,
)
from shard_plans.errors import GridError, OutputError, PlanError, ReshardError
from shard_plans.memory.cluster import parse_cluster
from shard_plans.memory.ledger import LedgerRow
from shard_plans.placement.experts import ExpertPlacement, contiguous
from shard_plans.placement.grid import make_grid

SOURCE = PlanSource("deepseek_v3", "0123456789abcdef" * 2, 91991, 688_574_839_360)
DENSE = Plan(SOURCE, make_grid(tp=2, pp=3), ((0, 1), (1, 3), (3, 6)))
MOE = Plan(
    SOURCE, make_grid(tp=4, pp=2, ep=2, etp=1), ((0, 31), (31, 62)),
    ExpertPlacement(contiguous(5, 2), {3: ((0, 1, 2, 4), (3, 4)), 7: ((0, 1, 2), (3, 4), (0, 1, 3), (2, 4))}),
    cluster=parse_cluster("2x4:80GB"),
    ledger=tuple(
        LedgerRow(rank, rank // 4, 10**9 + rank, 2, 3, 4, 5, 6, 80 * 10**9, 68 * 10**9, 4, 5, 6) for rank in range(8)
    ),
)  # fmt: skip


@pytest.mark.parametrize("plan", [DENSE, MOE, replace(DENSE, mtp="drop", strict_blocks=True, workload=Workload(1, 2))])
def test_a_plan_reads_back(plan: Plan, tmp_path: Path) -> None:
    write_plan(plan, tmp_path / "plan.yaml")
    again = read_plan(tmp_path / "plan.yaml")
    assert (again.grid, again.stages, again.checkpoint, again.workload) == (
        plan.grid, plan.stages, plan.checkpoint, plan.workload
    )  # fmt: skip
    assert (again.experts.default, dict(again.experts.layers)) == (plan.experts.default, dict(plan.experts.layers))
    assert again.ledger is None and plan_digest(again) == plan_digest(plan)
    assert format_plan(replace(again, ledger=plan.ledger)) == format_plan(plan)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.yaml"]


def test_the_document_is_what_people_edit() -> None:
    text = format_plan(MOE)
    assert "- 0-30\n- 31-61\n" in text and "    3:\n    - 0-2,4\n    - 3-4\n" in text and "fits: true" in text
    assert "  default: contiguous\n" in text and "80,000,000,000" in text
    moved = parse_plan(text.replace("- 0-30\n- 31-61", "- 0-29\n- 30-61"))
    assert moved.stages == ((0, 30), (30, 62))
    edited = parse_plan(text.replace("    - 0-2,4\n    - 3-4\n", "    - 0-3\n    - 4\n"))
    assert edited.experts.layers[3] == ((0, 1, 2, 3), (4,))


def test_digest_ignores_what_moves_no_byte() -> None:
    base = plan_digest(MOE)
    assert plan_digest(replace(MOE, ledger=None, cluster=None, workload=Workload(1))) == base
    for change in (
        {"mtp": "drop"}, {"strict_blocks": True}, {"stages": ((0, 30), (30, 62))}, {"grid": make_grid(4, 2)},
        {"experts": ExpertPlacement(contiguous(5, 2))}, {"checkpoint": replace(SOURCE, fingerprint="f" * 32)},
    ):  # fmt: skip
        assert plan_digest(replace(MOE, **change)) != base


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("reshard_plan: 1", "reshard_plan: 2", "line 7: reshard_plan is 2; it must be 1"),
        ("reshard_plan: 1\n", "", "lacks the key 'reshard_plan'"),
        ("mtp: keep", "mtp: maybe", "mtp is 'maybe'; allowed: keep, drop"),
        ("mtp: keep", "mtp: keep\nmpt: keep", "unknown key 'mpt'; allowed: .*mtp"),
        ("strict_blocks: false", "strict_blocks: no", "strict_blocks is 'no'; it must be true or false"),
        ("tp: 4", "tp: 0", "line 13: parallel / tp is 0; it must be at least 1"),
        ("tp: 4", "tp: -1", "at least 1"),
        ("tp: 4", "tp: 4.0", "whole number"),
        ("tp: 4", "tp: 99999999999", "at most 65536"),
        ("tp: 4", "tp: 65536", "more than 65536 ranks"),
        ("tp: 4", "tp: four", "whole number"),
        ("tp: 4, ", "", "lacks the key 'tp'"),
        ("- 0-30\n", "- 1-30\n", "line 15: stage 0 is 1-30; it must begin with layer 0"),
        ("- 31-61\n", "- 32-61\n", "line 16: stage 1 is 32-61; it must begin with layer 31"),
        ("- 31-61\n", "- 31-30\n", "its last layer is before its first"),
        ("- 31-61\n", "", "1 stages are listed, parallel has pp 2"),
        ("- 31-61\n", "- all\n", "stages / 1 is 'all'; it must be a layer or an inclusive range of layers"),
        ("- 31-61\n", "- 31-9999999\n", "such as 0-30"),
        ("- 31-61\n", "- {a: 1}\n", "such as 0-30"),
        ("default: contiguous", "default: spread", "it must be `contiguous` or a list"),
        ("default: contiguous", "default: [0-4]", "1 lists for ep 2"),
        ("default: contiguous", "default: [0-3, 3]", "expert 4 is on no ep slot"),
        ("default: contiguous", "default: [0-3, 4-5]", "names expert 5"),
        ("default: contiguous", "default: [0-3, 4-999999]", "makes more than"),
        ("count: 5", "count: 70000", "at most 65536"),
        ("    3:\n", "    3.5:\n", "a layer's number"),
        ("    3:\n", "    7:\n", "occurs twice"),
        ("fingerprint: 0", "fingerprint: x", "fingerprint is .*32 hex digits"),
        ("workload: {context: 8192", "workload: {context: 0", "context is 0"),
        ("kv_dtype: bf16", "kv_dtype: int3", "allowed: bf16"),
        ("memory: 80000000000", "memory: 0", "at least 1"),
    ],
)
def test_a_wrong_plan_is_refused_with_key_and_line(old: str, new: str, message: str) -> None:
    text = format_plan(MOE)
    assert old in text
    with pytest.raises((PlanError, GridError), match=message):
        parse_plan(text.replace(old, new, 1))


def test_lists_that_would_fill_the_memory_are_refused() -> None:
    slots = ", ".join(["0-65535"] * 4)
    layers = "".join(f"    {layer}: [{slots}]\n" for layer in range(100))
    text = format_plan(replace(MOE, grid=make_grid(4, 2, 1, 4, 1), experts=ExpertPlacement(contiguous(65536, 4))))
    with pytest.raises(PlanError, match="ids"):
        parse_plan(text.replace("  default: contiguous\n", "  default: contiguous\n  layers:\n" + layers))


def test_write_faults_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="can't be written"):
        write_plan(DENSE, tmp_path / "no" / "plan.yaml")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OutputError, match="can't be written"):
        write_plan(DENSE, tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    with pytest.raises(PlanError, match="missing"):
        read_plan(tmp_path / "plan.yaml")


VALUES = st.sampled_from(
    ["0", "-1", "99999999999999999999999", "true", "null", "[]", "{}", "text", "1e9", "'", "[[[[", "0-3", "&a 1", "!x"]
)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_mutated_plan_is_read_or_refused(data: Any) -> None:
    lines = format_plan(MOE).splitlines()[6:]
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.integers(0, len(lines) - 1))
        kind = data.draw(st.sampled_from(["drop", "double", "value", "indent"]))
        if kind == "drop":
            del lines[at]
        elif kind == "double":
            lines.insert(at, lines[at])
        elif kind == "value":
            lines[at] = lines[at].split(":")[0] + ": " + data.draw(VALUES)
        else:
            lines[at] = "  " + lines[at]
    try:
        plan = parse_plan("\n".join(lines))
    except ReshardError as error:
        assert "plan" in str(error) or isinstance(error, GridError)
    else:
        assert plan_digest(parse_plan(format_plan(plan))) == plan_digest(plan)
