"""A trained model: what the sharded forward pass says is, token for token, what transformers says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.tools.cli import RunCli
from tests.tools.refusals import nothing_whole, refused

pytestmark = pytest.mark.slow
PROMPT = "The capital of France is"
TOKENS = 24
EXPERTS = 4

Continuation = tuple[list[int], str]


@pytest.fixture(scope="module")
def expected(real: Callable[[int], Path]) -> Callable[[int], Continuation]:
    """Experts -> the token ids that transformers' `generate` adds to the prompt, and their text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    done: dict[int, Continuation] = {}

    def generate(experts: int) -> Continuation:
        if experts not in done:
            tokenizer = AutoTokenizer.from_pretrained(real(experts))
            model = AutoModelForCausalLM.from_pretrained(
                real(experts), dtype=torch.float32, attn_implementation="eager"
            )
            given = tokenizer(PROMPT, return_tensors="pt")
            ids = model.eval().generate(**given, max_new_tokens=TOKENS, do_sample=False)[0]
            added = ids[given.input_ids.shape[1] :].tolist()
            assert len(added) == TOKENS
            done[experts] = (added, tokenizer.decode(added))
        return done[experts]

    return generate


@pytest.mark.parametrize(
    ("experts", "sizes"),
    [
        (0, {"tp": 3}),
        (0, {"pp": 2}),
        (0, {"tp": 3, "pp": 2}),
        (EXPERTS, {"tp": 3, "ep": 3}),  # experts 2, 1, 1
        (EXPERTS, {"dp": 2, "ep": 2, "pp": 3}),
        (EXPERTS, {"dp": 3, "ep": 3}),
    ],
    ids=lambda value: " ".join(f"{k}{v}" for k, v in value.items()) if isinstance(value, dict) else f"experts{value}",
)
def test_greedy_continuation(
    experts: int,
    sizes: dict[str, int],
    real: Callable[[int], Path],
    expected: Callable[[int], Continuation],
    run_cli: RunCli,
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    flags = [word for name, size in sizes.items() for word in (f"--{name}", size)]
    run_cli("convert", real(experts), out, *flags)
    found = run_cli("verify-and-run", out, "--prompt", PROMPT, "--max-new-tokens", TOKENS, "--json").json
    ids, text = expected(experts)
    assert found["passed"] is True
    assert found["generated"] == ids
    assert found["text"].removeprefix(PROMPT) == text


def test_verified_against_the_reference(real: Callable[[int], Path], run_cli: RunCli, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_cli("convert", real(0), out, "--tp", 3, "--pp", 2)
    found = run_cli("verify-and-run", out, "--reference", real(0), "--prompt", PROMPT, "--json").json
    assert found["passed"] is True
    assert found["checks"]
    assert all(check["passed"] for check in found["checks"])
    assert run_cli("check", out, "--deep", real(0), "--json").json["passed"] is True


def test_tp_2_is_refused_with_the_legal_sizes(real: Callable[[int], Path], run_cli: RunCli, tmp_path: Path) -> None:
    for experts in (0, EXPERTS):
        refused(run_cli("convert", real(experts), tmp_path / "out", "--tp", 2, code=2), "tp", "9", "1, 3")
    nothing_whole(tmp_path / "out", run_cli)
