"""What a cluster is to serve: only the memory ledger and the prediction of time depend on it."""

from __future__ import annotations

from dataclasses import dataclass

from shard_plans.checkpoints.headers import brief
from shard_plans.errors import PlanError
from shard_plans.memory.amount import ENDS

LARGEST_COUNT = 2**40
"""Tokens or sequences."""
KV_DTYPES = ("bf16", "fp16", "fp32", "fp8", "mxfp8", "int8", "fp4", "fp8_ds_mla", "nvfp4_ds_mla", "fp8_raw")
"""Cache types; shard_plans/memory/kv_formats.yaml says what each stores."""
DISPATCHES = ("all_to_all", "deepep_low_latency", "deepep_high_throughput")
"""How token rows reach the experts of other ranks."""
ENGINES = ("reshard", "vllm", "sglang")
"""Engines whose rules are known (shard_plans/memory/engines)."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The load, and how its memory is counted."""

    context: int = 8192
    """Tokens of one sequence, prompt and answer."""
    concurrency: int = 16
    """Sequences at a time on the whole cluster; they are dealt to the dp replicas."""
    kv_dtype: str = "bf16"
    prefill_chunk: int = 8192
    """Tokens that one step of prefill runs at most."""
    prefix: int = 0
    """Tokens at the start that all sequences share; a replica caches them once."""
    image_tokens: int = 0
    """Tokens that a vision tower makes in one step; 0: what the engine lets it make."""
    dispatch: str = "all_to_all"
    engine: str = "reshard"
    """Whose rules are used: a name, or name@version for a release other than the newest that is known."""
    utilization: float = 0.85
    """Part of a card's memory that everything together may take."""
    assume: str = "high"
    """Which end of what can't be computed decides whether it fits: low, typical or high."""

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        allowed = {"kv_dtype": KV_DTYPES, "dispatch": DISPATCHES, "assume": ENDS}
        for name, words in allowed.items():
            if getattr(self, name) not in words:
                raise PlanError(
                    f"{name.replace('_', '-')} {brief(getattr(self, name))} is unknown; allowed: {', '.join(words)}"
                )
        if str(self.engine).partition("@")[0] not in ENGINES:
            raise PlanError(f"engine {brief(self.engine)} is unknown; allowed: {', '.join(ENGINES)}, or NAME@VERSION")
        for name in ("context", "concurrency", "prefill_chunk"):
            if not 1 <= getattr(self, name) <= LARGEST_COUNT:
                raise PlanError(f"{name} is {getattr(self, name)}; 1 to {LARGEST_COUNT} is possible")
        for name in ("prefix", "image_tokens"):
            if not 0 <= getattr(self, name) <= LARGEST_COUNT:
                raise PlanError(f"{name} is {getattr(self, name)}; 0 to {LARGEST_COUNT} is possible")
        if self.prefix > self.context:
            raise PlanError(f"prefix {self.prefix} is longer than the context, {self.context} tokens")
        if not 0 < self.utilization <= 1:
            raise PlanError(f"utilization is {self.utilization}; above 0 and up to 1 is possible")
