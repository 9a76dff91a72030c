"""From timed layers to a step of the whole pipeline, tokens a second and the time to the first token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shard_plans.cost.model import CostModel, Time, Times, total
from shard_plans.memory.activations import step_tokens
from shard_plans.memory.workload import Workload
from shard_plans.placement.grid import Grid


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds and tokens a second of one plan."""

    decode_step: float
    """Seconds in which every sequence gets one token."""
    decode_tokens: float
    """Tokens a second of all sequences together."""
    prefill_step: float
    """Seconds a chunk of prefill keeps the slowest stage busy."""
    prefill_tokens: float
    """Prompt tokens a second of all replicas together, the pipeline full."""
    first_token: float
    """Seconds until a prompt of the whole context, alone on its replica, has its first token."""
    decode_links: float
    """Part of the decode step spent in communication, 0 to 1."""
    prefill_links: float
    """The same of a prefill chunk."""
    bubble: float
    """Part of the decode step that the average stage waits, 0 to 1."""


def predict(
    model: CostModel, times: Times, grid: Grid, stages: Sequence[tuple[int, int]], workload: Workload
) -> Prediction:
    """The prediction for stages given as half-open ranges of layers; layers that don't run are left out.

    A decode step lasts as long as one micro-batch takes through all stages, or all micro-batches through the slowest.
    """
    sequences = -(-workload.concurrency // grid.dp)
    micro = times.micro_batches
    chunk = step_tokens(grid, workload)
    decode = _stages(times.decode, times.decode_ends, stages)
    prefill = _stages(times.prefill, times.prefill_ends, stages)
    hops = [model.hop(grid, stage, stages[stage][0], sequences / micro) for stage in range(1, grid.pp)]
    chunk_hops = [model.hop(grid, stage, stages[stage][0], chunk) for stage in range(1, grid.pp)]
    once, slowest = total(decode), max(stage.total for stage in decode)
    wait = max(hops, default=0.0)
    step = max(once.total + sum(hops), micro * (slowest + wait))
    through = max(stage.total for stage in prefill) + max(chunk_hops, default=0.0)
    chunks = -(-workload.context // chunk)
    first = total(prefill).total + sum(chunk_hops) + (chunks - 1) * through
    busy = min(grid.dp, workload.concurrency)
    talking = once.links + sum(hops)
    return Prediction(
        step,
        workload.concurrency / step,
        through,
        busy * chunk / through,
        first,
        talking / (once.total + sum(hops)),
        (total(prefill).links + sum(chunk_hops)) / (total(prefill).total + sum(chunk_hops)),
        max(0.0, 1 - micro * once.total / (grid.pp * step)),
    )


@dataclass(frozen=True, slots=True)
class Bounds:
    """Seconds that no split into stages undercuts."""

    decode_step: float
    prefill_step: float
    first_token: float
    links: float
    """Part of a decode micro-batch spent in communication inside the layers, 0 to 1."""


def bounds(times: Times, grid: Grid) -> Bounds:
    """What a grid's times allow at best, whatever its stages."""
    decode = total(times.decode) + times.decode_ends[0] + times.decode_ends[1]
    prefill = total(times.prefill) + times.prefill_ends[0] + times.prefill_ends[1]
    step = max(decode.total, times.micro_batches * decode.total / grid.pp)
    return Bounds(step, prefill.total / grid.pp, prefill.total, decode.links / decode.total)


def _stages(times: Sequence[Time], ends: tuple[Time, Time], stages: Sequence[tuple[int, int]]) -> list[Time]:
    found = [total(times[first:stop]) for first, stop in stages]
    found[0] = found[0] + ends[0]
    found[-1] = found[-1] + ends[1]
    return found
