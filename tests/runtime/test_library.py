"""--reference transformers: that library's own model finds what ranks and reference have in common."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import reshard
from runtime.blocks import experts, ffn
from runtime.checking import library, outside
from runtime.checking.checks import AIM
from runtime.checking.reference import Record, Reference
from shard_plans.errors import RuntimeFault
from shard_plans.verbs import open_binding
from tests.conftest import MakeCheckpoint
from tests.tools.cli import RunCli
from tests.tools.kimi import TINY
from tests.tools.sharded import checks, convert_tiny, failed

MORE = (
    "gpt_oss_mxfp4",
    "kimi_k25_int4",
    "qwen3_vl_moe",
    "deepseek_v4_fp4",
    "glm4_moe",
    "qwen3_next",
    "deepseek_v32",
    "llama4_text",
)


@pytest.fixture
def output(tiny: MakeCheckpoint, tmp_path: Path) -> Path:
    convert_tiny(tiny("mixtral"), tmp_path / "out", {"tp": 2, "ep": 2})
    return tmp_path / "out"


@pytest.mark.parametrize(
    "name",
    [
        "mixtral",
        "deepseek_v3_fp8",
        *(pytest.param(each, marks=pytest.mark.slow) for each in MORE),
    ],
)
def test_the_reference_is_what_transformers_computes(name: str, tiny: MakeCheckpoint, tmp_path: Path) -> None:
    convert_tiny(tiny(name), tmp_path / "out", {"ep": 2, "tp": 2})
    result = reshard.verify_and_run(tmp_path / "out", tiny(name), transformers=True)
    found = checks(result)["transformers"]
    assert result.passed, found
    assert found.worst is not None and found.worst < AIM
    assert "ranks' logits differ by" in found.note
    assert not any("fools both" in sentence for sentence in result.not_checked)


def test_what_fools_ranks_and_reference_alike_is_found(
    output: Path, tiny: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = ffn.gated

    def swapped(words: Mapping[str, Any], gate: Tensor, up: Tensor) -> Tensor:
        return right(words, up, gate)

    for module in (ffn, experts):
        monkeypatch.setattr(module, "gated", swapped)
    assert reshard.verify_and_run(output, tiny("mixtral")).passed
    result = reshard.verify_and_run(output, tiny("mixtral"), transformers=True)
    assert failed(result) == {"transformers"}
    assert "layer " in checks(result)["transformers"].where


def test_prompts_are_compared_too(output: Path, tiny: MakeCheckpoint, run_cli: RunCli) -> None:
    words = ("--reference", tiny("mixtral"), "--reference", "transformers", "--input-ids", "1,2,3", "--json")
    found = run_cli("verify-and-run", output, *words).json
    assert "transformers" in {check["name"] for check in found["checks"]}


def test_where_it_cannot_be_had_the_run_ends_before_it_begins(
    output: Path, tiny: MakeCheckpoint, tmp_path: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeFault, match="needs the checkpoint too"):
        reshard.verify_and_run(output, transformers=True)
    two = run_cli("verify-and-run", output, "--reference", "a", "--reference", "b", code=2)
    assert "give one checkpoint" in two.stderr
    convert_tiny(TINY, tmp_path / "kimi", {"tp": 1})
    with pytest.raises(RuntimeFault, match="has no class"):
        reshard.verify_and_run(tmp_path / "kimi", TINY, transformers=True)
    with monkeypatch.context() as patch:
        patch.setattr(library, "free_bytes", lambda device: 1000)
        with pytest.raises(RuntimeFault, match=r"take \d+ bytes in float32, and 1000 bytes of memory are free"):
            reshard.verify_and_run(output, tiny("mixtral"), transformers=True)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(RuntimeFault, match="isn't installed; run: pip install transformers"):
        reshard.verify_and_run(output, tiny("mixtral"), transformers=True)


def test_a_layer_that_is_no_number_is_not_forgotten(tiny: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes behind it may be right again: each layer is fed with the library's own input."""
    with Reference(open_binding(tiny("llama")), torch.float32, torch.device("cpu")) as own:
        texts, records = [torch.tensor([5, 6, 7])], list[Record]()
        own.begin_all(texts)
        for _ in own.context.model.forward_layers:
            records.append(own.next_layer())
        outs = [record.out.clone() for record in records]
        seen = library.Seen([record.start for record in records], outs, own.logits())
        monkeypatch.setattr(outside, "open_library", lambda binding: None)
        monkeypatch.setattr(outside, "look", lambda *_: seen)
        assert outside.judge_reference(own, texts, None).passed
        outs[0][1] = math.nan
        found = outside.judge_reference(own, texts, None)
    assert not found.passed and found.worst is None and "layer 0, row 1: nan" in found.where
