"""Which layout and plan a folder was written by: the one whose names, types and shapes are those of its files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from converter.findings import Failure
from converter.foreign.folder import Foreign, Kind
from shard_plans.documents.plan import Plan
from shard_plans.documents.plan_check import plan_source
from shard_plans.errors import GridError, ManifestError, PlanError
from shard_plans.families.binding import Binding
from shard_plans.layouts.layout import Layout
from shard_plans.layouts.registry import LAYOUTS
from shard_plans.placement.experts import ExpertPlacement, contiguous
from shard_plans.placement.grid import Grid
from shard_plans.placement.shards import Placement
from shard_plans.search.grids import expert_count


@dataclass(frozen=True, slots=True)
class Match:
    """A layout and plan, and where the folder differs from them."""

    plan: Plan
    placement: Placement
    failures: tuple[Failure, ...]


def match(foreign: Foreign, binding: Binding) -> Match:
    """The layout and plan that the folder differs least from. Raises PlanError where no layout can hold the model."""
    found, refused = [], []
    for layout, plan in _candidates(foreign, binding):
        try:
            placement = layout.place(binding, plan)
        except (GridError, PlanError) as error:
            refused.append(error)
            continue
        found.append(Match(plan, placement, tuple(_differences(foreign, placement))))
        if not found[-1].failures:
            break
    if not found:
        raise refused[0]
    return min(found, key=lambda each: len(each.failures))


def confirmed(foreign: Foreign, binding: Binding) -> Match:
    """The same. Raises ManifestError where the folder isn't exactly what the plan makes."""
    found = match(foreign, binding)
    if found.failures:
        first, grid = found.failures[0], found.plan.grid
        raise ManifestError(
            f"{foreign.path} isn't what {found.plan.layout} holds of this {binding.family.name} model at tp {grid.tp} "
            f"pp {grid.pp} ep {grid.ep}: {first.file}, {first.tensor} {first.reason} ({len(found.failures)} such "
            f"differences); what was saved after kernels had repacked it, or of another model, can't be read back"
        )
    return found


def _candidates(foreign: Foreign, binding: Binding) -> Iterator[tuple[Layout, Plan]]:
    """Every release of the engine, experts dealt to all ranks or cut by them."""
    tp, pp = foreign.files.ranks, foreign.files.stages
    experts, layers = expert_count(binding), len(binding.model.forward_layers)
    stages = foreign.stages(layers)
    layouts = [layout for layout in LAYOUTS.values() if layout.engine == foreign.files.engine]
    dealt = (tp, 1) if foreign.files.engine == "deepseek" else (1, tp)
    for layout in reversed(layouts):
        for ep in dict.fromkeys(dealt if experts else (1,)):
            placement = ExpertPlacement(contiguous(experts, ep)) if experts else ExpertPlacement()
            plan = Plan(plan_source(binding), Grid(tp, pp, 1, ep, tp // ep), stages, placement, mtp="drop")
            yield layout, layout.chosen(binding, plan)


def _differences(foreign: Foreign, placement: Placement) -> Iterator[Failure]:
    for file in placement.files:
        place = file.place["stage"], file.place["tp"]
        held, first = dict(foreign.tensors[place]), foreign.files.places[place][0]
        for tensor in file.tensors:
            name, kind = held.pop(tensor.name, (first, None))
            if kind is None:
                yield Failure(name, tensor.name, "is missing")
            elif kind != (tensor.dtype, tensor.shape):
                yield Failure(
                    name, tensor.name, f"is {_words(kind)}, the layout holds {_words((tensor.dtype, tensor.shape))}"
                )
        for tensor_name, (name, kind) in held.items():
            yield Failure(name, tensor_name, f"is {_words(kind)}, of which the layout knows nothing")


def _words(kind: Kind) -> str:
    return f"{kind[0]} {list(kind[1])}"
