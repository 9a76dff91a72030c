"""What the page shows, as one JSON object."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from shard_plans.families.binding import Binding
from shard_plans.memory.count import stage_lines
from shard_plans.memory.payload import Payload
from shard_plans.placement.experts import ExpertPlacement, Slots, format_ids
from shard_plans.report import PARTS
from shard_plans.report_html.curves import curves
from shard_plans.report_search import found_json
from shard_plans.search.found import Found

WORDS = {
    "weights": "weights",
    "kv_cache": "KV cache",
    "activations": "activations",
    "communication": "communication",
    "runtime": "runtime",
}


def page_data(binding: Binding, found: Found) -> dict[str, Any]:
    """Everything that the page's scripts draw; a plan without a cluster has no limit to draw."""
    plan = found.plan
    payload = Payload(binding, plan.strict_blocks, plan.weights)
    return {
        **found_json(found),
        "model": {
            "family": plan.checkpoint.family,
            "tensors": plan.checkpoint.tensors,
            "bytes": plan.checkpoint.bytes,
            "layers": len(binding.model.forward_layers),
        },
        "parts": [{"key": part, "name": WORDS[part]} for part in PARTS],
        "curves": [asdict(curve) for curve in curves(binding.model, plan)] if plan.ledger else [],
        "experts_by_slot": _experts(plan.experts, binding) if plan.experts.default else None,
        "operators": [
            {
                "stage": lines.stage,
                "rank": lines.rank,
                "component": WORDS[item.component],
                "operator": item.operator,
                "low": item.amount.low,
                "typical": item.amount.typical,
                "high": item.amount.high,
                "source": item.source or None,
            }
            for lines in stage_lines(payload, plan, "operator")
            for item in lines.items
        ],
    }


def _experts(placement: ExpertPlacement, binding: Binding) -> dict[str, Any]:
    """Placements as id ranges; layers that are dealt alike share one."""
    layers = sorted({p.layer for p in binding.parameters if p.per_expert and p.layer is not None})
    numbers: dict[Slots, int] = {}
    by_layer = {
        layer: numbers.setdefault(placement.layers.get(layer, placement.default), len(numbers)) for layer in layers
    }
    return {
        "count": binding.model.sizes["experts"],
        "placements": [[format_ids(ids) for ids in slots] for slots in numbers],
        "layers": [[layer, number] for layer, number in by_layer.items()],
    }
