"""Runs that nothing was done to: other weights, another architecture, plan and prompt for every seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from runtime.opened import open_output
from runtime.request import VISION, RunOptions
from runtime.result import RunResult
from runtime.run import verify_and_run
from shard_plans.errors import GridError, PlanError
from tests.mutations.models import make
from tests.mutations.pictures import pictures
from tests.mutations.run import prompt
from tests.tools.plans import DENSE_PLANS, MOE_PLANS
from tests.tools.sharded import convert_tiny

ARCHITECTURES = (
    "llama", "qwen2", "qwen3", "mixtral", "qwen3_moe", "qwen3_moe_fp8", "glm4_moe", "ernie4_5_moe", "minimax_m2",
    "gpt_oss", "gpt_oss_mxfp4", "deepseek_v2", "deepseek_v3", "deepseek_v3_fp8", "deepseek_v32", "glm_moe_dsa",
    "deepseek_v4", "kimi_k25_int4", "kimi_linear", "qwen3_next", "qwen3_5_moe", "llama4_text", "qwen3_vl_moe",
    "minimax_m3_vl", "qwen3_deep", "glm4_moe_deep", "deepseek_v3_deep", "gpt_oss_deep", "kimi_linear_deep",
    "qwen3_next_deep",
)  # fmt: skip
SEEING = ("kimi_k25", "kimi_k3", "qwen3_vl_moe", "qwen3_5_moe", "minimax_m3_vl", "kimi_k25_int4")
"""Those with a vision tower that runs."""
LONGEST = 40
"""Tokens of the longest prompt: behind every window, and several chunks of linear attention."""


@dataclass(frozen=True, slots=True)
class Clean:
    """A run and what it was."""

    what: str
    result: RunResult


def clean(seed: int, folder: Path, made: Callable[[str], Path] | None = None, images: bool = False) -> Clean:
    """Make, convert and verify what the seed says, below an empty folder; with `images` among the tokens.

    `made` gives checkpoints that are there already, by name; without it each has values of its own.
    """
    dice = random.Random(seed)
    name, compute = (
        dice.choice(SEEING if images else ARCHITECTURES),
        dice.choice(("float32", "float32", "float32", "float64")),
    )
    source, out = folder / "checkpoint" if made is None else made(name), folder / "out"
    if made is None:
        make(name, source, seed)
    plans = [*DENSE_PLANS, *MOE_PLANS]
    dice.shuffle(plans)
    sizes = next(sizes for sizes in plans if _fits(source, out, sizes))
    if images:
        ids, what = pictures(dice, open_output(out).model, folder), "three images"
    else:
        ids = prompt(dice, dice.randint(1, LONGEST))
        what = f"{ids.count(',') + 1} tokens"
    options = RunOptions(out, source, input_ids=ids, compute=compute, max_new_tokens=dice.choice((0, 2)))
    if images:
        options = replace(options, vision=dice.choice(VISION))
    return Clean(f"seed {seed}: {name}, {sizes}, {compute}, {what}", verify_and_run(options))


def _fits(source: Path, out: Path, sizes: dict[str, int]) -> bool:
    """Whether the model can be cut so; then it is."""
    try:
        convert_tiny(source, out, sizes)
    except (GridError, PlanError):
        return False
    return True
