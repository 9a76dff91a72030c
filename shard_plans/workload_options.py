"""Command-line options that describe the load and how its memory is counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from shard_plans.memory.amount import ENDS
from shard_plans.memory.workload import DISPATCHES, KV_DTYPES
from shard_plans.options import TOKENS

Command = TypeVar("Command", bound=Callable[..., Any])

LOAD = (
    "context", "concurrency", "kv_dtype", "prefill_chunk", "prefix", "image_tokens", "dispatch", "engine",
    "utilization", "assume",
)  # fmt: skip
"""Fields of Workload that the command line gives."""


def workload_options(command: Command) -> Command:
    """--context, --concurrency, --kv-dtype and the rest of LOAD."""
    for option in (
        click.option("--assume", default="high", show_default=True, type=click.Choice(ENDS),
                     help="Which end of what can't be computed must fit."),
        click.option("--utilization", default=0.85, show_default=True, type=float,
                     help="Part of each card's memory that everything together may take."),
        click.option("--engine", default="reshard", show_default=True,
                     help="Whose rules are used: reshard, vllm, sglang; vllm@0.8.5 for a release."),
        click.option("--dispatch", default="all_to_all", show_default=True, type=click.Choice(DISPATCHES),
                     help="How token rows reach experts of other ranks."),
        click.option("--image-tokens", default=0, type=click.IntRange(0),
                     help="Tokens that a vision tower makes in one step; 0: as many as the engine lets it."),
        click.option("--prefix", default="0", type=PREFIX, help="Tokens at the start that all sequences share."),
        click.option("--prefill-chunk", default=8192, show_default=True, type=TOKENS,
                     help="Tokens that one step of prefill runs at most."),
        click.option("--kv-dtype", default="bf16", show_default=True, type=click.Choice(KV_DTYPES),
                     help="KV cache type."),
        click.option("--concurrency", default=16, show_default=True, type=click.IntRange(1),
                     help="Sequences at a time."),
        click.option("--context", type=TOKENS, help="Tokens of one sequence; 128K, 1M. Without it 8192, or fewer where "
                     "the model allows no more."),
    ):  # fmt: skip
        command = option(command)
    return command


class Prefix(click.ParamType):  # type: ignore[type-arg]  # generic only in click's stubs
    """A number of tokens that may be 0."""

    name = "TOKENS"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number; a usage error where it isn't one."""
        return 0 if value in (0, "0") else TOKENS.convert(value, param, ctx)


PREFIX = Prefix()
