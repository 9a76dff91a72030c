"""Which programs can load the shards of a plan, in which layout, and why others can't."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shard_plans.documents.plan import NATIVE, Plan
from shard_plans.errors import ReshardError
from shard_plans.families.binding import Binding
from shard_plans.layouts.layout import Layout
from shard_plans.layouts.registry import LAYOUTS
from shard_plans.layouts.vllm_rules import plugin_reasons


@dataclass(frozen=True, slots=True)
class Loader:
    """One way to load the shards of a plan."""

    engine: str
    """vllm or deepseek."""
    loader: str
    """What loads them, in words."""
    layout: str
    """The --layout to convert with."""
    reason: str | None
    """Why it can't, as a sentence; None where it can."""


def find_loaders(binding: Binding, plan: Plan) -> tuple[Loader, ...]:
    """Every engine's ways, whether they can load the plan's shards or not."""
    plugin = "; ".join(plugin_reasons(binding, plan)) or None
    found = [Loader("vllm", "vLLM --load-format reshard", NATIVE, plugin)]
    others = (layout for layout in LAYOUTS.values() if layout.name != NATIVE)
    for layout in sorted(others, key=lambda layout: layout.engine != "vllm"):
        found.append(Loader(layout.engine, layout.loader, layout.name, _reason(binding, plan, layout)))
    return tuple(found)


def _reason(binding: Binding, plan: Plan, layout: Layout) -> str | None:
    """Why the layout can't hold the plan: what can't be had is only known when it is laid out."""
    try:
        layout.place(binding, layout.chosen(binding, replace(plan, layout=NATIVE)))
    except ReshardError as error:
        return str(error)
    return None


def refused_by(engine: str, loaders: tuple[Loader, ...]) -> str | None:
    """Why no way of the engine can load the shards; None where one can, or it has none."""
    ways = [loader for loader in loaders if loader.engine == engine]
    if not ways or any(way.reason is None for way in ways):
        return None
    return "; ".join(f"{way.loader}: {way.reason}" for way in ways)
