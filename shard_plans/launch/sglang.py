"""SGLang's flags for a plan.

Facts, from SGLang's server arguments and parallel state as of release 0.5.23: --tp-size is all ranks of a stage, of
which --dp-size with --enable-dp-attention makes attention replicas of tp_size / dp_size ranks; experts use the same
ranks as --moe-dp-size x --ep-size x what is left, in this order; SGLANG_PP_LAYER_PARTITION counts the layers of each
stage; --chunked-prefill-size is divided by dp_size; --init-expert-location takes a map of the experts of every slot, of
which all hold equally many; --mem-fraction-static is the part of a card for weights and caches.
"""

from __future__ import annotations

import json
from dataclasses import replace

from shard_plans.documents.plan import Plan
from shard_plans.launch.command import (
    HEAD,
    NODE,
    Command,
    Launch,
    Shell,
    each_replica,
    everywhere,
    node_shape,
    one_replica,
    partition,
    stored_otherwise,
)  # fmt: skip
from shard_plans.layouts.vllm_rules import in_order

CACHES = {"bf16": "bf16", "fp8": "fp8_e4m3", "fp4": "fp4_e2m1"}
"""Our cache types -> --kv-cache-dtype."""
DEEPEP = {"deepep_low_latency": "low_latency", "deepep_high_throughput": "normal"}
LOCATIONS = "experts.json"
PORT = 5000


def sglang_launch(plan: Plan, checkpoint: str, layers: int) -> Launch:
    """The commands, or why it can't have this layout. `layers`: those that run."""
    grid, load = plan.grid, plan.workload
    alone = one_replica(plan)
    if alone is not None:
        found = sglang_launch(alone, checkpoint, layers)
        return replace(found, commands=each_replica(plan, found.commands))
    reasons = tuple(_reasons(plan))
    if reasons:
        return Launch("sglang", reasons=reasons)
    words = ["python", "-m", "sglang.launch_server", "--model-path", checkpoint]
    words += ["--tp-size", str(grid.stage_ranks)]
    environment, files = {}, {}
    if grid.pp > 1:
        words += ["--pp-size", str(grid.pp)]
        environment["SGLANG_PP_LAYER_PARTITION"] = partition(plan, layers)
    if grid.dp > 1:
        words += ["--dp-size", str(grid.dp), "--enable-dp-attention", "--enable-dp-lm-head"]
        if grid.tp == 1:
            words += ["--moe-dense-tp-size", "1"]
    if plan.experts.default:
        words += ["--ep-size", str(grid.ep)] if grid.ep > 1 else []
        words += ["--moe-dp-size", str(grid.edp)] if grid.edp > 1 else []
        if load.dispatch in DEEPEP and grid.ep > 1:
            words += ["--moe-a2a-backend", "deepep", "--deepep-mode", DEEPEP[load.dispatch]]
        if not in_order(plan):
            copies = sum(map(len, plan.experts.default)) - _experts(plan)
            words += ["--init-expert-location", LOCATIONS]
            words += ["--ep-num-redundant-experts", str(copies)] if copies else []
            files[LOCATIONS] = json.dumps({"physical_to_logical_map": _locations(plan, layers)})
    words += ["--context-length", str(load.context), "--max-running-requests", str(load.concurrency)]
    words += ["--chunked-prefill-size", str(load.prefill_chunk * grid.dp), "--kv-cache-dtype", CACHES[load.kv_dtype]]
    if plan.ledger and plan.cluster is not None:
        words += ["--mem-fraction-static", f"{_static(plan):.2f}"]
    nodes, _ = node_shape(plan)
    if nodes > 1:
        words += ["--nnodes", str(nodes), "--node-rank", NODE, "--dist-init-addr", Shell(f"{HEAD}:{PORT}")]
    commands = (Command(everywhere(nodes), tuple(words), environment),)
    return Launch("sglang", commands, notes=tuple(_notes(plan, layers)), files=files)


def _static(plan: Plan) -> float:
    """The part of a card that the plan leaves to weights and caches, on its fullest rank; rounded down."""
    row = min(plan.ledger or (), key=lambda row: row.headroom)
    static = (row.limit - row.activations - row.communication - row.runtime) / row.capacity
    return max(0, int(static * 100)) / 100


def _experts(plan: Plan) -> int:
    return 1 + max(max(ids) for ids in plan.experts.default)


def _locations(plan: Plan, layers: int) -> list[list[int]]:
    """The expert of each physical place, layer by layer; dense layers get the default, which nobody reads."""
    slots = (plan.experts.layers.get(layer, plan.experts.default)[: plan.grid.ep] for layer in range(layers))
    return [[expert for ids in each for expert in ids] for each in slots]


def _reasons(plan: Plan) -> list[str]:
    grid, found = plan.grid, stored_otherwise(plan, "SGLang")
    experts = plan.experts
    if experts.default:
        every = (experts.default, *experts.layers.values())
        lengths = {len(ids) for slots in every for ids in slots}
        if len(lengths) > 1:
            found.append(
                f"SGLang gives every expert slot equally many; the plan gives {min(lengths)} to {max(lengths)}"
            )
        if experts.replicas_differ(grid):
            found.append("SGLang gives all copies of a stage's experts the same places; the plan's replicas differ")
        if grid.edp > 1 and plan.workload.dispatch in DEEPEP:
            found.append(f"SGLang's DeepEP wants one copy of a stage's experts; the plan has {grid.edp}")
        if grid.etp > 1 and grid.ep > 1 and plan.workload.dispatch in DEEPEP:
            found.append(f"SGLang's DeepEP deals whole experts; the plan cuts each over etp {grid.etp} ranks")
    if plan.workload.kv_dtype not in CACHES:
        found.append(f"SGLang has no KV cache of type {plan.workload.kv_dtype} that is known here")
    return found


def _notes(plan: Plan, layers: int) -> list[str]:
    grid, found = plan.grid, []
    if grid.dp > 1 and grid.tp > 1:
        found.append(
            f"SGLang cuts dense layers and shared experts over all {grid.stage_ranks} ranks of a stage, the plan over "
            f"tp {grid.tp}"
        )
    if plan.mtp == "keep" and plan.stages[-1][1] > layers:
        found.append("multi-token-prediction layers are loaded only with --speculative-algorithm")
    return found
