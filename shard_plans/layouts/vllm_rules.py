"""What vLLM can carry out of a plan, whichever way it loads: how it deals experts, and cuts the vocabulary."""

from __future__ import annotations

import math

from shard_plans.documents.plan import Plan
from shard_plans.errors import PlanError
from shard_plans.families.binding import Binding
from shard_plans.families.dims import padded
from shard_plans.placement.experts import contiguous
from shard_plans.placement.grid import Grid

VOCABULARY = "round 64"
"""The vocabulary is padded to whole 64 rows, whatever the number of ranks, and then must divide."""
SMALLEST_BLOCK = 32
"""Rows and columns that share a scale, at least, where vLLM refines them."""
NATIVE_VOCABULARY = "pad 64"
"""How shards pad it where the family's table doesn't say."""

WHOLE_HEADS = ("gpt_oss",)
"""Families whose class gives each rank whole KV heads, and so none at tp above their number."""
TURNED = ("llama4", "llama4_text")
"""Families whose class reads whole query, key and expert weights, and cuts what it has made of them."""
EVERYWHERE = ("gpt_oss", "mixtral", "qwen3_moe", "qwen3_next")
"""Families whose class has embedding, last norm or head on every pipeline stage."""


def engine_reasons(binding: Binding, grid: Grid) -> list[str]:
    """Why vLLM can't run this model on the grid, as sentences; empty where it can."""
    found = grid_reasons(grid) if "experts" in binding.model.sizes else []
    return [*found, *size_reasons(binding, grid.tp)]


def quantised_router(binding: Binding) -> str | None:
    """The first plain router whose full name config.json doesn't list as such, if there is one.

    Source: `is_layer_skipped` in quantization/utils/quant_utils.py, which wants equal names for FP8.
    """
    section = binding.model.text.get("quantization_config") or {}
    listed = section.get("ignored_layers") or section.get("modules_to_not_convert") or []
    routers = (p for p in binding.parameters if p.role == "moe.router" and p.format is None)
    names = (p.parts[0].pattern.removesuffix(".weight") for p in routers)
    return next((name for name in names if not isinstance(listed, list) or name not in listed), None)


def size_reasons(binding: Binding, tp: int) -> list[str]:
    """Why vLLM can't cut this model into `tp` parts: it repeats neither rows of a vocabulary nor linear key heads."""
    rows, heads = padded(binding.model.sizes["vocab"], VOCABULARY, tp), binding.model.sizes.get("key_heads", tp)
    found = [f"tp {tp} doesn't divide the vocabulary, which the engine pads to {rows} rows"] if rows % tp else []
    if heads % tp:
        found.append(f"tp {tp} doesn't divide the {heads} key heads of linear attention, which the engine only cuts")
    kv_heads = binding.model.sizes.get("kv_heads", tp)
    if binding.family.name in WHOLE_HEADS and kv_heads < tp:
        found.append(
            f"tp {tp} is above the {kv_heads} KV heads, which vLLM's class of {binding.family.name} doesn't repeat: it "
            f"divides by zero; choose tp {kv_heads} or less"
        )
    return found


def grid_reasons(grid: Grid) -> list[str]:
    """Why vLLM can't deal experts on the grid."""
    grid = grid.one_replica(True) or grid
    stage = grid.stage_ranks
    if grid.ep * grid.etp != stage:
        return [
            f"vLLM deals each stage's experts to all {stage} of its ranks once; the plan keeps {grid.edp} copies "
            f"of them (ep {grid.ep} x etp {grid.etp})"
        ]
    if grid.ep > 1 and grid.etp > 1:
        return [
            f"vLLM either deals whole experts or cuts each over all ranks of a stage; the plan does both "
            f"(ep {grid.ep}, etp {grid.etp})"
        ]
    return []


def expert_reasons(plan: Plan) -> list[str]:
    """Why vLLM can't place the experts as the plan does."""
    if not plan.experts.default:
        return []
    found = grid_reasons(plan.grid)
    if plan.grid.ep > 1 and not in_order(plan):
        found.append("vLLM places experts in order and balances them by itself; the plan places them otherwise")
    return found


def in_order(plan: Plan) -> bool:
    """Whether experts lie in order on the ep slots, in every layer."""
    slots = plan.experts.default
    count = 1 + max(max(ids) for ids in slots)
    dealt = contiguous(count, plan.grid.ep)
    return all(each in (dealt, dealt * plan.grid.edp) for each in (slots, *plan.experts.layers.values()))


def expert_block(binding: Binding, grid: Grid) -> tuple[int, int] | None:
    """The FP8 block that vLLM 0.33 refines the scales of experts to under `--moe-backend auto`; None: as stored.

    It is square, and divides the stored block, the hidden size and the width of an expert on a rank. Raises PlanError
    where it would be smaller than vLLM takes. Source: `refine_fp8_moe_block_shape` in fused_moe/oracle/fp8.py.
    """
    stored = next((p.block for p in binding.parameters if p.per_expert and p.format is not None), None)
    if stored is None:
        return None
    width, hidden = binding.model.sizes["expert_ffn"] // grid.etp, binding.model.sizes["hidden"]
    if width % stored[0] == 0 and (grid.etp == 1 or width % stored[1] == 0):
        return None
    finer = math.gcd(*stored, width, hidden)
    if finer < SMALLEST_BLOCK:
        raise PlanError(
            f"experts {width} wide on a rank are cut inside blocks of {stored[0]} x {stored[1]}: vLLM refines their "
            f"scales to blocks of {SMALLEST_BLOCK} at least, and these sizes allow {finer}; choose a smaller tp, or "
            f"--ep {grid.tp}, or a --moe-backend that pads to whole blocks, with reshard's own layout (--load-format "
            f"reshard)"
        )
    return finer, finer


def plugin_reasons(binding: Binding, plan: Plan) -> list[str]:
    """Why `--load-format reshard` can't load native shards of the plan."""
    vocabulary, tp = binding.model.sizes["vocab"], plan.grid.tp
    found = [*expert_reasons(plan), *size_reasons(binding, tp)]
    native = binding.family.uneven.get("vocab", NATIVE_VOCABULARY)
    rows, engine = (padded(vocabulary, rule, tp) // tp for rule in (native, VOCABULARY))
    if tp > 1 and rows != engine and not padded(vocabulary, VOCABULARY, tp) % tp:
        found.append(f"each rank has {rows} rows of the vocabulary, the engine gives it {engine}; choose another tp")
    if max(tp, plan.grid.ep, plan.grid.etp) > 1 and binding.family.name in TURNED:
        found.append(
            "vLLM's class turns whole query, key and expert weights before it cuts them, and a rank has a part; "
            "use a layout"
        )
    if plan.grid.pp > 1 and binding.family.name in EVERYWHERE:
        found.append(
            "vLLM's class has embedding, norm or head on every stage, and shards hold them where they run; use a "
            "layout, or pp 1"
        )
    if plan.weights:
        told = ", ".join(f"{group} as {name}" for group, name in plan.weights.items())
        found.append(f"vLLM reads weights as the checkpoint stores them; the plan stores {told}")
    return found
