"""How likely texts are: as transformers finds them, several at once as each alone, and wrong weights named by text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import reshard
from runtime.checking.checks import AIM
from runtime.prompts import read_prompts
from tests.conftest import MakeCheckpoint
from tests.tools import tamper
from tests.tools.sharded import checks, convert_tiny, expected, failed
from tests.tools.words import write_tokenizer

LINES = ("the cat sat on the mat", "the dog", "a")


@pytest.fixture
def output(own_tiny: MakeCheckpoint, tmp_path: Path) -> tuple[Path, Path, Path]:
    """An output, its checkpoint with a tokenizer, and a file of prompts."""
    source, out, file = own_tiny("mixtral"), tmp_path / "out", tmp_path / "prompts.txt"
    write_tokenizer(source)
    convert_tiny(source, out, {"tp": 2, "ep": 2})
    file.write_text("\n".join(LINES))
    return out, source, file


def test_a_text_is_as_likely_as_transformers_finds_it(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    source = tiny("qwen3_moe")
    convert_tiny(source, tmp_path / "out", {"tp": 2, "pp": 2, "ep": 2})
    result = reshard.verify_and_run(tmp_path / "out", source, input_ids=source / "reference.safetensors")
    wanted = expected(source)
    ids, scores = wanted["input_ids"][0], wanted["logits"][0].double().log_softmax(-1)
    likelihood = float(scores[:-1].gather(1, ids[1:, None]).mean())
    (text,) = result.figures["texts"]
    assert text["tokens"] == len(ids)
    assert text["log_likelihood"] == pytest.approx(likelihood, rel=1e-5)
    assert text["reference_log_likelihood"] == pytest.approx(likelihood, rel=1e-5)
    assert 0 <= text["divergence"] < 1e-9


def test_several_texts_are_run_at_once_as_each_alone(output: tuple[Path, Path, Path]) -> None:
    out, source, file = output
    together = reshard.verify_and_run(out, source, prompts=file, max_new_tokens=0)
    assert together.passed and together.figures["input_ids"] == []
    found = together.figures["texts"]
    assert len(found) == len(LINES) and sum(text["tokens"] for text in found) == together.figures["tokens"]
    for name in ("layers", "operators", "decode", "hidden", "logits"):
        assert (checks(together)[name].worst or 1) < AIM, name
    for line, text in zip(LINES, found, strict=True):
        alone = reshard.verify_and_run(out, prompt=line, max_new_tokens=0)
        (one,) = alone.figures["texts"]
        assert one["tokens"] == text["tokens"] and one["reference_log_likelihood"] is None
        if text["tokens"] > 1:
            assert one["log_likelihood"] == pytest.approx(text["log_likelihood"], rel=1e-5)


def test_wrong_weights_show_in_the_texts(output: tuple[Path, Path, Path]) -> None:
    out, source, file = output
    for name in ("stage-0-ep-0-etp-0.safetensors", "stage-0-ep-1-etp-0.safetensors"):
        tamper.swap_experts(out, name, "layers.1.experts.down")
    result = reshard.verify_and_run(out, source, prompts=file, max_new_tokens=0)
    assert {"layers", "operators", "logits"} <= failed(result)
    assert "layer 1" in checks(result)["layers"].where and "prompt " in checks(result)["layers"].where
    assert max(text["divergence"] for text in result.figures["texts"]) > 1e-6


def test_low_precision_is_compared_text_by_text(output: tuple[Path, Path, Path]) -> None:
    out, source, file = output
    result = reshard.verify_and_run(out, source, prompts=file, max_new_tokens=0, compute="bfloat16")
    assert {"likelihood", "divergence", "operators"} <= set(checks(result))
    assert all(text["divergence"] > 0 for text in result.figures["texts"])


def test_prompts_that_come_with_reshard(tmp_path: Path) -> None:
    code, mathematics, long, chinese = read_prompts(Path("bundled"))
    compile(code, "prompt", "exec")
    assert "\n" in code and "integral" in mathematics and len(long) > 1000
    assert all("\u4e00" <= sign <= "\u9fff" for sign in chinese[:10])
    (tmp_path / "lines").write_text('"two\\nlines"\n"said" she\n\n""\n')
    assert read_prompts(tmp_path / "lines") == ["two\nlines", '"said" she', '""']


def test_a_single_token_has_no_likelihood(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    convert_tiny(tiny("llama"), tmp_path / "out", {"tp": 2})
    result = reshard.verify_and_run(tmp_path / "out", tiny("llama"), input_ids=[5])
    (text,) = result.figures["texts"]
    assert text["log_likelihood"] is None and text["divergence"] < 1e-9
    assert torch.isfinite(torch.tensor(text["divergence"]))
