"""The layouts that there are, by name, and plans laid out in theirs."""

from __future__ import annotations

from dataclasses import replace

from shard_plans.documents.plan import Plan
from shard_plans.errors import PlanError
from shard_plans.families.binding import Binding
from shard_plans.layouts.deepseek_mp import DeepSeekMp
from shard_plans.layouts.keys import releases
from shard_plans.layouts.layout import Layout
from shard_plans.layouts.native import Native
from shard_plans.layouts.vllm import VllmShardedState
from shard_plans.placement.place import left_out
from shard_plans.placement.shards import Placement

_ENGINES = [VllmShardedState(release) for release in releases("vllm")]
LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (Native(), DeepSeekMp(), *_ENGINES)}


def find_layout(name: str) -> Layout:
    """The layout of that name. Raises PlanError where there is none."""
    found = LAYOUTS.get(name)
    if found is None:
        raise PlanError(f"layout {name!r} isn't known; known: {', '.join(LAYOUTS)}")
    return found


def lay_out_plan(binding: Binding, plan: Plan) -> Placement:
    """Every file of the plan, in its layout. Raises GridError, and PlanError where the layout can't express it."""
    layout = find_layout(plan.layout)
    kept = tuple(p for p in binding.parameters if p.role not in layout.computed)
    placement = layout.place(replace(binding, parameters=kept), plan)
    left = left_out(
        (p for p in binding.parameters if p.role in layout.computed), f"a buffer that {layout.name} computes"
    )
    return replace(placement, skipped=(*placement.skipped, *left))
