"""Near-ties on the ladder: counted apart where rounding explains them, a failure where it doesn't."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runtime.checking.reference import Record, Reference
from runtime.request import RunOptions
from runtime.run import RunResult, verify_and_run
from tests.conftest import MakeCheckpoint
from tests.tools.cli import RunCli
from tests.tools.sharded import convert_tiny

LAYER, TOKEN = 1, 7


@pytest.fixture
def output(tiny: MakeCheckpoint, tmp_path: Path) -> Path:
    convert_tiny(tiny("mixtral"), tmp_path / "out", {"tp": 2, "ep": 2})
    return tmp_path / "out"


def forge(monkeypatch: pytest.MonkeyPatch, margin: float, spoil: float = 0.0, token: int = TOKEN) -> None:
    """Let the reference say that it sent one token elsewhere, by that margin, with another result."""
    honest = Reference.next_layer

    def next_layer(self: Reference) -> Record:
        record = honest(self)
        if record.layer.index != LAYER:
            return record
        assert record.routing is not None
        ids, margins, out = record.routing.indices.clone(), record.routing.margin.clone(), record.out.clone()
        ids[token, 0] = next(expert for expert in range(8) if expert not in ids[token])
        margins[token] = margin
        out[token] += spoil
        return replace(record, out=out, routing=replace(record.routing, indices=ids, margin=margins))

    monkeypatch.setattr(Reference, "next_layer", next_layer)


def verify(output: Path, source: Path) -> RunResult:
    return verify_and_run(RunOptions(output, source))


def test_a_near_tie_is_counted_apart(output: Path, tiny: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    forge(monkeypatch, 1e-9, spoil=1.0)
    result = verify(output, tiny("mixtral"))
    checks = {check.name: check for check in result.checks}
    assert checks["layers"].passed or "layer 2" in checks["layers"].where  # layer 2 starts from the forged output
    assert checks["routing"].passed
    assert "2 near-ties" in checks["routing"].note  # on both ranks
    assert checks["hidden"].passed
    assert checks["logits"].passed
    assert f"over {TOKEN} tokens" in checks["logits"].note
    assert any(f"sent token {TOKEN} to other experts" in sentence for sentence in result.not_checked)


def test_a_near_tie_of_the_first_token_leaves_nothing_to_compare_and_does_not_pass(
    output: Path, tiny: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    forge(monkeypatch, 1e-9, token=0)
    result = verify(output, tiny("mixtral"))
    failed = {check.name: check.note for check in result.checks if not check.passed}
    assert not result.passed
    assert set(failed) == {"hidden", "logits"}
    assert "give another prompt" in failed["logits"]


def test_a_route_that_rounding_cannot_explain_fails(
    output: Path, tiny: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    forge(monkeypatch, 1e-2)
    result = verify(output, tiny("mixtral"))
    failed = {check.name: check.where for check in result.checks if not check.passed}
    assert set(failed) == {"routing"}
    assert f"layer {LAYER}, rank 0, token {TOKEN}" in failed["routing"]
    assert "by a margin of" in failed["routing"]


def test_the_report_names_checks_and_what_was_not_checked(output: Path, tiny: MakeCheckpoint, run_cli: RunCli) -> None:
    ran = run_cli("verify-and-run", output, "--reference", tiny("mixtral"), "--max-new-tokens", 2)
    for word in ("hashes", "bytes", "layers", "routing", "hidden", "logits", "passed", "generated: ", "Not checked:"):
        assert word in ran.stdout
    assert "FAILED" not in ran.stdout
    assert "fools both" in ran.stdout


def test_nothing_is_left_on_stdout_but_the_document(output: Path, tiny: MakeCheckpoint, run_cli: RunCli) -> None:
    found = run_cli("verify-and-run", output, "--reference", tiny("mixtral"), "--input-ids", "1,2,3", "--json").json
    assert found["passed"] is True
    assert found["tokens"] == 3
    assert set(found["checks"][0]) >= {"name", "passed", "worst", "limit", "where"}
    assert torch.tensor([check["limit"] for check in found["checks"]]).isfinite().all()
