"""What the planner says for one row of the ground truth."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from shard_plans.documents.plan import Plan, Workload
from shard_plans.documents.yaml_text import load_yaml
from shard_plans.families.binding import Binding
from shard_plans.families.config_binding import bind_config
from shard_plans.families.family import load_family
from shard_plans.memory.amount import Amount
from shard_plans.memory.caches import cached, kept
from shard_plans.memory.count import rank_items
from shard_plans.memory.engine import engine_stages, load_engine
from shard_plans.memory.needs import stage_ranges
from shard_plans.memory.payload import Payload
from shard_plans.memory.pool import pool_tokens
from tests.tools.plans import make_plan

FOLDER = Path(__file__).parent
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Score:
    """One figure of one row."""

    row: str
    model: str
    what: str
    logged: float
    planned: float
    target: float | None
    """Percent that a test holds it to; None: it is only listed."""
    remark: str

    @property
    def error(self) -> float:
        """Percent; above 0 where the planner says more than the log."""
        return 100 * (self.planned - self.logged) / self.logged


def rows() -> dict[str, dict[str, str]]:
    """The ground truth by id, as it was collected from public logs."""
    with (FOLDER / "ground_truth.csv").open(encoding="utf-8", newline="") as file:
        return {row["id"]: row for row in csv.DictReader(file)}


def cases() -> dict[str, dict[str, Any]]:
    """How each row is scored, or why not."""
    data, _ = load_yaml(FOLDER / "cases.yaml", "cases")
    return dict(data)


@cache
def _binding(name: str, changes: str) -> Binding:
    folders = (FOLDER.parent / "checkpoints" / "configs", FOLDER / "configs")
    path = next(path for folder in folders if (path := folder / f"{name}.json").is_file())
    config = _merged(json.loads(path.read_text()), json.loads(changes))
    return bind_config(config, "0" * 32, path, load_family(config))


def _merged(config: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The config with these keys instead, sections key by key."""
    inner = {key: _merged(config.get(key, {}), value) for key, value in changes.items() if isinstance(value, dict)}
    return {**config, **changes, **inner}


def score(row: Mapping[str, str], case: Mapping[str, Any]) -> list[Score]:
    """All figures of a row that can be compared; none where the case says why not."""
    found = []
    for what in case.get("score", ()):
        logged, planned = _FIGURES[what](row, case)
        remark = "; ".join(str(case[key]) for key in ("rule", "assumed", "cause") if key in case)
        found.append(Score(row["id"], row["model"], what, logged, planned, case.get("target", {}).get(what), remark))
    return found


def _plan(row: Mapping[str, str], case: Mapping[str, Any]) -> tuple[Binding, Plan]:
    binding = _binding(case["config"], json.dumps(case.get("set", {})))
    sizes = {"tp": case["tp"], "pp": case.get("pp", 1), "ep": case.get("ep", 1)}
    workload = Workload(
        context=case.get("context", 4096), concurrency=1, kv_dtype=case.get("kv_dtype", "bf16"), engine=case["engine"]
    )
    plan = make_plan(binding, sizes, mtp="drop")
    layers = len(binding.model.forward_layers)
    return binding, replace(
        plan, stages=engine_stages(load_engine(case["engine"]), layers, plan.grid.pp), workload=workload
    )


def _weights(row: Mapping[str, str], case: Mapping[str, Any]) -> tuple[float, float]:
    binding, plan = _plan(row, case)
    items = rank_items(Payload(binding), plan, 0)
    held = sum(item.amount.typical for item in items if item.component == "weights")
    return float(row["weights_gib_per_gpu"]), held / GIB


def activations(row: Mapping[str, str], case: Mapping[str, Any], tokens: int) -> tuple[float, Amount]:
    """GiB that the log prints, and the planner's range for a profiling step of so many tokens, on the printed rank."""
    binding, plan = _plan(row, case)
    load = replace(plan.workload, prefill_chunk=tokens, context=max(tokens, plan.workload.context))
    stage = 0 if plan.grid.pp > 1 else plan.grid.pp - 1
    found = stage_ranges(binding.model, plan.grid, load, stage, plan.stages[stage])
    return float(row["activation_peak_gib"]), found["activations"]


def _tokens(row: Mapping[str, str], case: Mapping[str, Any]) -> tuple[float, float]:
    return float(row["kv_cache_tokens"]), _pool(row, case)


def _blocks(row: Mapping[str, str], case: Mapping[str, Any]) -> tuple[float, float]:
    block = int(load_engine(case["engine"]).value("kv_block"))
    return float(row["num_gpu_blocks"]), _pool(row, case) // block


def _longest(row: Mapping[str, str], case: Mapping[str, Any]) -> tuple[float, float]:
    return float(case["longest"]), _pool(row, case)


def _full(row: Mapping[str, str], case: Mapping[str, Any]) -> tuple[float, float]:
    """GiB of the layers without a window."""
    binding, plan = _plan(row, case)
    load = Workload(case["full"], case["sequences"], kv_dtype=case["kv_dtype"])
    held = sum(
        cached(item, plan.grid, load).typical
        for layer in binding.model.forward_layers
        for item in kept(layer, binding.model, plan.grid, load)
        if item.window is None
    )
    return float(row["kv_cache_mem_gib"]), held / GIB


def _pool(row: Mapping[str, str], case: Mapping[str, Any]) -> int:
    binding, plan = _plan(row, case)
    room = round(float(row["kv_cache_mem_gib"]) * GIB)
    return min(pool_tokens(binding.model, plan.grid, plan.workload, stage, room) for stage in plan.stages)


_FIGURES = {"weights": _weights, "tokens": _tokens, "blocks": _blocks, "longest": _longest, "full": _full}
