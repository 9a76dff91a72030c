"""The bytes that caches hold are those of the plan's ledger for the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.kv_options import KvOptions
from runtime.request import RunOptions
from runtime.run import verify_and_run
from shard_plans.verbs import plan_memory
from tests.conftest import MakeCheckpoint
from tests.tools.plans import plan_id
from tests.tools.sharded import convert_tiny

PROMPT, NEW, CHUNK = 209, 4, 11
"""In the prompt's last chunk a window of 8 begins with the last token of a block: it lies over as many as it can."""


def held(source: Path, out: Path, sizes: dict[str, int], format: str, compute: str) -> tuple[int, int]:
    """Bytes of the fullest rank: measured, and by the ledger."""
    if not out.exists():
        convert_tiny(source, out, sizes)
    options = RunOptions(
        out, context=PROMPT, max_new_tokens=NEW, ignore_end=True, compute=compute, cache=KvOptions(format, chunk=CHUNK)
    )
    cluster = f"1x{sizes.get('tp', 1) * sizes.get('pp', 1)}:80GB"
    plan = plan_memory(
        source, cluster, **sizes, context=PROMPT + NEW - 1, concurrency=1, kv_dtype=format,
        prefill_chunk=CHUNK,
    )  # fmt: skip
    assert plan.ledger is not None
    return verify_and_run(options).figures["kv_cache_bytes"], max(rank.kv_cache for rank in plan.ledger)


@pytest.mark.parametrize(
    ("name", "sizes", "compute"),
    [
        ("llama", {"tp": 2, "pp": 2}, "float32"),
        ("qwen3_moe", {"tp": 4, "ep": 4}, "float32"),  # KV heads are repeated
        ("gpt_oss", {"tp": 2}, "float32"),  # every other layer has a window
        ("deepseek_v3", {"tp": 2, "pp": 2}, "float32"),  # latents
        ("kimi_linear", {"tp": 2}, "bfloat16"),  # latents and states
        pytest.param("qwen3_next", {"tp": 2}, "bfloat16", marks=pytest.mark.slow),
    ],
    ids=lambda value: plan_id(value) if isinstance(value, dict) else str(value),
)
def test_the_ledger_counts_what_is_held(
    name: str, sizes: dict[str, int], compute: str, tiny: MakeCheckpoint, tmp_path: Path
) -> None:
    formats = ("fp32", "bf16", "fp8", "int8") if name == "llama" else ("bf16", "fp8")
    found = [held(tiny(name), tmp_path / "out", sizes, format, compute) for format in formats]
    assert [measured for measured, _ in found] == [counted for _, counted in found]
    assert found[0][0] > found[1][0]
