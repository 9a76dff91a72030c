"""A trained model and its mixture of experts: 64 tokens behind each of several prompts, as transformers answers them.

Plans with tp, ep, pp and dp; one prompt and several at once, whole and in chunks; narrow caches by their smoke tests.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.tools.cli import RunCli

pytestmark = pytest.mark.slow
TOKENS = 64
EXPERTS = 4
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):  # returns the n-th number of the sequence, which begins with 0 and 1",
    "Once upon a time there was a lighthouse keeper who had not spoken to anyone for so long that he began to greet "
    "the gulls by name. One morning, after a storm, he found on the rocks below his door a wooden box, and inside it",
)

Answers = list[list[int]]


@pytest.fixture(scope="module")
def expected(real: Callable[[int], Path]) -> Callable[[int], Answers]:
    """Experts -> what transformers' `generate` adds to each prompt alone, in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    done: dict[int, Answers] = {}

    def generate(experts: int) -> Answers:
        if experts not in done:
            tokenizer = AutoTokenizer.from_pretrained(real(experts))
            model = AutoModelForCausalLM.from_pretrained(
                real(experts), dtype=torch.float32, attn_implementation="eager"
            ).eval()
            done[experts] = []
            for prompt in PROMPTS:
                given = tokenizer(prompt, return_tensors="pt")
                ids = model.generate(**given, max_new_tokens=TOKENS, do_sample=False)[0]
                done[experts].append(ids[given.input_ids.shape[1] :].tolist())
        return done[experts]

    return generate


@pytest.fixture
def answers(real: Callable[[int], Path], run_cli: RunCli, tmp_path: Path) -> Callable[..., dict[str, object]]:
    """`answers(experts, sizes, *flags)`: what the command says."""
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS))

    def run(experts: int, sizes: dict[str, int], *flags: object) -> dict[str, object]:
        out = tmp_path / "out"
        run_cli("convert", real(experts), out, *(word for name, size in sizes.items() for word in (f"--{name}", size)))
        found = run_cli("verify-and-run", out, "--prompts", file, "--max-new-tokens", TOKENS, *flags, "--json").json
        assert isinstance(found, dict)
        return found

    return run


@pytest.mark.parametrize(
    ("experts", "sizes", "flags"),
    [
        (0, {"tp": 3}, ()),
        (0, {"tp": 3, "pp": 2}, ("--prefill-chunk", 16, "--kv-block", 8)),
        (EXPERTS, {"tp": 3, "ep": 3}, ("--prefill-chunk", 16)),
        (EXPERTS, {"dp": 2, "ep": 2, "pp": 3}, ("--kv-block", 32)),
    ],
    ids=["tp3", "tp3 pp2 chunked", "tp3 ep3 chunked", "dp2 ep2 pp3"],
)
def test_several_prompts_at_once(
    experts: int,
    sizes: dict[str, int],
    flags: tuple[object, ...],
    answers: Callable[..., dict[str, object]],
    expected: Callable[[int], Answers],
) -> None:
    found = answers(experts, sizes, *flags)
    assert [answer["generated"] for answer in found["answers"]] == expected(experts)  # type: ignore[attr-defined]
    assert found["passed"] is True


@pytest.mark.parametrize("experts", [0, EXPERTS])
@pytest.mark.parametrize("format", ["fp8", "int8"])
def test_narrow_caches(experts: int, format: str, answers: Callable[..., dict[str, object]]) -> None:
    found = answers(experts, {"tp": 3}, "--kv-cache", format, "--prefill-chunk", 16)
    checks = {check["name"]: check for check in found["checks"]}  # type: ignore[attr-defined]
    assert {"cache", "cache_likelihood"} <= set(checks) and ("cache_routing" in checks) == bool(experts)
    assert found["passed"] is True, checks
    for answer in found["answers"]:  # type: ignore[attr-defined]
        assert len(answer["generated"]) == TOKENS or answer["text"]
