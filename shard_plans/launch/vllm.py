"""vLLM's flags for a plan.

Facts, from vLLM's documentation and parallel configuration as of release 0.33: ranks are ordered replica, stage,
tensor; the experts of a stage are dealt to all of its dp x tp ranks in order (--enable-expert-parallel, the first ranks
hold one more where they don't divide), or each is cut over all of them; VLLM_PP_LAYER_PARTITION counts the layers of
each stage; a replica that spans nodes takes --nnodes, replicas inside nodes take --data-parallel-size-local, and
replicas that each span nodes take Ray with VLLM_RAY_DP_PACK_STRATEGY=span.
"""

from __future__ import annotations

from dataclasses import replace

from shard_plans.documents.plan import Plan
from shard_plans.launch.command import (
    HEAD,
    NODE,
    Command,
    Launch,
    Shell,
    each_replica,
    node_shape,
    one_replica,
    partition,
    seats,
    stored_otherwise,
)  # fmt: skip
from shard_plans.layouts.vllm_rules import expert_reasons

CACHES = {"bf16": "bfloat16", "fp8": "fp8", "fp8_ds_mla": "fp8_ds_mla", "nvfp4_ds_mla": "nvfp4_ds_mla"}
"""Our cache types -> --kv-cache-dtype."""
DISPATCH = {"deepep_low_latency": "deepep_low_latency", "deepep_high_throughput": "deepep_high_throughput"}


def vllm_launch(plan: Plan, checkpoint: str, layers: int) -> Launch:
    """The commands, or why it can't have this layout. `layers`: those that run."""
    grid, load = plan.grid, plan.workload
    alone = one_replica(plan) if plan.experts.default else None  # of dense models --data-parallel-size does the same
    if alone is not None:
        found = vllm_launch(alone, checkpoint, layers)
        return replace(found, commands=each_replica(plan, found.commands))
    reasons = tuple(_reasons(plan))
    if reasons:
        return Launch("vllm", reasons=reasons)
    words = ["vllm", "serve", checkpoint, "--tensor-parallel-size", str(grid.tp)]
    environment = {}
    if grid.pp > 1:
        words += ["--pipeline-parallel-size", str(grid.pp)]
        environment["VLLM_PP_LAYER_PARTITION"] = partition(plan, layers)
    if grid.dp > 1:
        words += ["--data-parallel-size", str(grid.dp)]
    if grid.ep > 1:
        words += ["--enable-expert-parallel"]
        if load.dispatch in DISPATCH:
            words += ["--all2all-backend", DISPATCH[load.dispatch]]
    words += ["--max-model-len", str(load.context), "--max-num-seqs", str(seats(plan))]
    words += ["--max-num-batched-tokens", str(load.prefill_chunk), "--kv-cache-dtype", CACHES[load.kv_dtype]]
    words += ["--gpu-memory-utilization", f"{load.utilization:g}"]
    return Launch("vllm", _on_nodes(plan, words, environment), notes=tuple(_notes(plan, layers)))


def _on_nodes(plan: Plan, words: list[str], environment: dict[str, str]) -> tuple[Command, ...]:
    nodes, ranks = node_shape(plan)
    grid, replica = plan.grid, plan.grid.tp * plan.grid.pp
    others = "node 1" if nodes == 2 else f"nodes 1-{nodes - 1}"
    if nodes == 1:
        return (Command("one node", tuple(words), environment),)
    if grid.dp == 1:
        words += ["--nnodes", str(nodes), "--node-rank", NODE, "--master-addr", HEAD]
        return Command("node 0", tuple(words), environment), Command(others, (*words, "--headless"), environment)
    if ranks % replica == 0:
        local = ranks // replica
        words += ["--data-parallel-size-local", str(local), "--data-parallel-address", HEAD]
        words += ["--data-parallel-rpc-port", "13345"]
        start = Shell(f"$((NODE * {local}))")
        behind = ("--data-parallel-start-rank", start, "--headless")
        return Command("node 0", tuple(words), environment), Command(others, (*words, *behind), environment)
    words += ["--data-parallel-backend", "ray", "--distributed-executor-backend", "ray"]
    return (Command("one node of a Ray cluster", tuple(words), {**environment, "VLLM_RAY_DP_PACK_STRATEGY": "span"}),)


def _reasons(plan: Plan) -> list[str]:
    found = stored_otherwise(plan, "vLLM")
    found += expert_reasons(plan)
    if plan.workload.kv_dtype not in CACHES:
        found.append(f"vLLM has no KV cache of type {plan.workload.kv_dtype} that is known here")
    return found


def _notes(plan: Plan, layers: int) -> list[str]:
    grid, found = plan.grid, []
    if grid.dp > 1 and grid.pp > 1:
        found.append(
            "vLLM numbers ranks by replica, then stage; the plan by stage, then replica: other ranks share a node"
        )
    if plan.mtp == "keep" and plan.stages[-1][1] > layers:
        found.append("multi-token-prediction layers are loaded only with --speculative-config")
    return found
