"""Near-ties on the ladder: counted apart where rounding explains them, a failure where it doesn't."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from runtime.blocks.cache import LayerCache
from runtime.blocks.router import Routing
from runtime.checking.checks import AIM
from runtime.checking.probes import Recorder
from runtime.checking.reference import Record, Reference
from runtime.request import RunOptions
from runtime.result import RunResult
from runtime.run import verify_and_run
from tests.conftest import MakeCheckpoint
from tests.tools import tamper
from tests.tools.cli import RunCli
from tests.tools.sharded import checks, convert_tiny, failed

LAYER, TOKEN = 1, 7


@pytest.fixture
def output(tiny: MakeCheckpoint, tmp_path: Path) -> Path:
    convert_tiny(tiny("mixtral"), tmp_path / "out", {"tp": 2, "ep": 2})
    return tmp_path / "out"


def forge(monkeypatch: pytest.MonkeyPatch, margin: float, token: int = TOKEN) -> None:
    """Let the reference send one token elsewhere, and say that it did so by that margin."""
    honest = Reference.next_layer

    def elsewhere(self: Recorder, routing: Routing) -> Tensor:
        ids = routing.indices.clone()
        ids[token, 0] = next(expert for expert in range(8) if expert not in ids[token])
        return ids

    def next_layer(self: Reference) -> Record:
        forged = self._number == LAYER  # type: ignore[attr-defined]
        self._number += 1  # type: ignore[attr-defined]
        with monkeypatch.context() as patch:
            if forged:
                patch.setattr(Recorder, "routed", elsewhere)
            record = honest(self)
        if not forged:
            return record
        assert record.routing is not None
        margins = record.routing.margin.clone()
        margins[token] = margin
        return replace(record, routing=replace(record.routing, margin=margins))

    monkeypatch.setattr(Reference, "_number", 0, raising=False)
    monkeypatch.setattr(Reference, "next_layer", next_layer)


def verify(output: Path, source: Path) -> RunResult:
    return verify_and_run(RunOptions(output, source))


@pytest.mark.parametrize("token", [0, TOKEN])
def test_a_near_tie_is_counted_apart_and_its_route_replayed(
    output: Path, tiny: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch, token: int
) -> None:
    forge(monkeypatch, 1e-9, token)
    result = verify(output, tiny("mixtral"))
    found = checks(result)
    assert result.passed
    assert "1 near-tie that rounding turned" in found["routing"].note
    for name in ("layers", "operators", "decode", "hidden", "logits"):  # over all tokens, that one too
        assert (found[name].worst or 1) < AIM, name
    assert any("1 near-ties of routers" in sentence for sentence in result.not_checked)
    layer = result.layers[LAYER]
    assert layer.ties == layer.replayed == [token] and result.layers[0].ties == []


def test_a_near_tie_does_not_hide_what_is_wrong_beside_it(
    output: Path, tiny: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    forge(monkeypatch, 1e-9, token=0)
    for file in ("stage-0-ep-0-etp-0.safetensors", "stage-0-ep-1-etp-0.safetensors"):
        tamper.swap_experts(output, file, f"layers.{LAYER}.experts.down")
    result = verify(output, tiny("mixtral"))
    assert {"layers", "operators", "hidden", "logits"} <= failed(result)
    assert checks(result)["routing"].passed
    assert f"layer {LAYER}, rank 0, experts, token" in checks(result)["operators"].where


def test_a_route_that_rounding_cannot_explain_fails(
    output: Path, tiny: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    forge(monkeypatch, 1e-2)
    result = verify(output, tiny("mixtral"))
    where = checks(result)["routing"].where
    assert {"routing", "layers", "hidden", "logits"} <= failed(result)
    assert f"layer {LAYER}, rank 0, token {TOKEN}" in where and "by a margin of" in where
    assert result.layers[LAYER].wrong == [TOKEN] and result.layers[LAYER].replayed == []


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


def test_a_fault_of_the_cache_shows_step_by_step(
    output: Path, tiny: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = LayerCache.append

    def stale(
        self: LayerCache,
        positions: Tensor,
        parts: Sequence[Tensor],
        window: int | None = None,
        chunk: int | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        seen, kept = honest(self, positions, parts, window, chunk)
        return seen, [torch.cat([part[:1], part[:-1]]) if len(positions) == 1 else part for part in kept]

    monkeypatch.setattr(LayerCache, "append", stale)
    result = verify(output, tiny("mixtral"))
    assert failed(result) == {"decode"}
    assert "layer " in checks(result)["decode"].where
