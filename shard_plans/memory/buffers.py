"""Buffers of collectives and of the dispatch of token rows to experts."""

from __future__ import annotations

from shard_plans.families.model import Model, experts_a_token
from shard_plans.memory.activations import COMPUTE, arriving_rows, expert_row, step_tokens, stream
from shard_plans.memory.engine import load_engine
from shard_plans.memory.workload import Workload
from shard_plans.placement.grid import Grid

MIB = 1 << 20
NODE = 8
"""Cards of a node, where DeepEP's buffers between nodes are counted: an expert group of more ranks spans nodes."""
DEEPEP_TOKENS = 128
"""Tokens a rank that low-latency dispatch is sized for at least (num_max_dispatch_tokens_per_rank)."""


def communication(model: Model, grid: Grid, workload: Workload) -> dict[str, int]:
    """Bytes of buffers in flight, by operator; what the collectives' library itself takes is in the engine's ranges.

    tp: an all-reduce's tokens x hidden and the engine's fixed buffer; pp: the stream that is sent and the one received;
    experts on other ranks: `dispatch`.
    """
    engine, tokens, row = load_engine(workload.engine), step_tokens(grid, workload), COMPUTE * model.sizes["hidden"]
    found = {}
    if grid.tp > 1:
        found["all-reduce"] = tokens * row + int(engine.value("custom_all_reduce", 0)) * MIB
    if grid.pp > 1:
        found["stage borders"] = 2 * tokens * row * stream(model, len(model.forward_layers))
    if model.sizes.get("experts") and grid.ep * grid.etp > 1:
        found["expert dispatch"] = dispatch(model, grid, workload)
    return found


def dispatch(model: Model, grid: Grid, workload: Workload) -> int:
    """Bytes of the buffers through which token rows reach experts of other ranks and come back.

    all_to_all: rows sent and rows that arrive, both ways. deepep_low_latency: DeepEP's csrc/legacy/config.hpp, for the
    rows of one decoding step. deepep_high_throughput: the engine's fixed buffer, twice where the group spans nodes.
    """
    if workload.dispatch == "deepep_low_latency":
        rows = max(DEEPEP_TOKENS, -(-workload.concurrency // (grid.dp * grid.tp)))
        return deepep_low_latency(expert_row(model), model.sizes["experts"], rows)
    if workload.dispatch == "deepep_high_throughput":
        buffer = int(load_engine(workload.engine).value("deepep_high_throughput", 1024)) * MIB
        return buffer * (2 if grid.ep * grid.etp > NODE else 1)
    sent = -(-step_tokens(grid, workload) // grid.tp) * experts_a_token(model)
    return 2 * COMPUTE * expert_row(model) * (sent + arriving_rows(model, grid, workload))


def deepep_low_latency(hidden: int, experts: int, rows: int) -> int:
    """Bytes of DeepEP's low-latency buffer for `rows` tokens a rank: two of each kind."""
    scales = hidden // 128 * 4
    sent, returned = 16 + max(2 * hidden, hidden + scales), scales + 2 * hidden
    signals = -(-4 * experts // 128) * 128
    return 2 * max(rows * sent, experts * rows * returned) + 2 * experts * rows * max(sent, returned) + 2 * signals
