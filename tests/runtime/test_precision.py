"""verify-and-run over converted weights: strict beside what they became, judged beside what they were."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from converter.verbs import convert
from runtime.checking import precision
from runtime.request import RunOptions
from runtime.result import RunResult
from runtime.run import verify_and_run
from tests.conftest import MakeCheckpoint
from tests.tools import tamper

IDS = "3,4,5,6,7,8"


def verified(folder: Path, out: Path, weights: str, **sizes: Any) -> RunResult:
    """Convert and verify."""
    convert(folder, out, weights=weights, **sizes)
    return verify_and_run(RunOptions(out=out, reference=folder, input_ids=IDS))


@pytest.mark.parametrize(
    ("source", "weights", "sizes"),
    [
        ("deepseek_v3_fp8", "bf16", {"tp": 2, "ep": 2}),
        ("deepseek_v3_fp8", "attention=fp8_channel,experts=nvfp4,shared=int8_channel,mlp=int4_group", {"tp": 2}),
        ("llama", "fp8_block,head=fp8_block,embeddings=fp16,norms=fp32", {"tp": 2, "pp": 2}),
        ("qwen2", "mxfp4_group,embeddings=fp8_channel", {"pp": 3}),
    ],
)
def test_converted_weights_pass_the_strict_limits(
    tiny: MakeCheckpoint, tmp_path: Path, source: str, weights: str, sizes: dict[str, int]
) -> None:
    result = verified(tiny(source), tmp_path / "out", weights, **sizes)
    checks = {check.name: check for check in result.checks}
    assert result.passed, result.checks
    assert {"hashes", "bytes", "layers", "hidden", "logits", "precision"} <= checks.keys()
    assert checks["layers"].worst is not None and checks["layers"].worst < 1e-5
    found = checks["precision"]
    assert found.bound == "least" and found.worst is not None and 0.9 < found.worst < 1
    assert "logits' cosine is 0.9" in found.note or "logits' cosine is 1.0" in found.note
    assert any("changes the precision" in words for words in result.not_checked)


def test_an_exact_conversion_has_nothing_to_judge(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    result = verified(tiny("deepseek_v3_fp8"), tmp_path / "out", "fp32", tp=2)
    assert result.passed and "precision" not in {check.name for check in result.checks}


def test_too_large_a_loss_is_a_failed_check(
    tiny: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "COSINE", 0.99999)
    result = verified(tiny("llama"), tmp_path / "out", "fp8_block")
    assert not result.passed
    assert [check.name for check in result.checks if not check.passed] == ["precision"]


def test_a_wrong_scale_is_found(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    folder, out = tiny("llama"), tmp_path / "out"
    convert(folder, out, weights="fp8_block", tp=2)
    with tamper.opened(out, "stage-0-tp-1.safetensors") as shard:
        scale = np.frombuffer(shard.data["layers.1.mlp.down.scale"], np.float32) * 4
        shard.data["layers.1.mlp.down.scale"] = scale.astype(np.float32).tobytes()
    result = verify_and_run(RunOptions(out=out, reference=folder, input_ids=IDS))
    failed = {check.name: check for check in result.checks if not check.passed}
    assert "bytes" in failed and "layers.1.mlp.down.scale" in failed["bytes"].where


def test_a_layer_that_is_no_number_is_not_forgotten(
    tiny: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cosines = iter([math.nan])
    monkeypatch.setattr(precision, "cosine", lambda *_: next(cosines, 0.9999))
    result = verified(tiny("llama"), tmp_path / "out", "fp8_block")
    (found,) = [check for check in result.checks if not check.passed]
    assert (found.name, found.worst) == ("precision", None) and "layer 0: nan" in found.where
