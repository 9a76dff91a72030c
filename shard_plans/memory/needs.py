"""What the ranks of a stage need beside their weights, item by item: cache, activations, buffers, what engines reserve.

Cache and buffers follow from formulas; what can't be computed is a range with its source (shard_plans/memory/engines).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shard_plans.families.model import Layer, Model
from shard_plans.memory.activations import activations, arriving_rows, expert_row, logits, step_tokens, stream
from shard_plans.memory.amount import ENDS, NOTHING, Amount, exactly, total
from shard_plans.memory.buffers import communication
from shard_plans.memory.caches import UNSURE_SOURCE, cached, kept
from shard_plans.memory.engine import load_engine
from shard_plans.memory.vision import encoder_cache, image_tokens, tower_activations
from shard_plans.memory.workload import Workload
from shard_plans.placement.grid import Grid

__all__ = [
    "Item", "Need", "activations", "arriving_rows", "expert_row", "kv_cache", "logits", "stage_items", "stage_need",
    "stage_ranges", "step_tokens", "stream",
]  # fmt: skip
COMPONENTS = ("kv_cache", "activations", "communication", "runtime")


@dataclass(frozen=True, slots=True)
class Item:
    """One thing that a rank needs memory for."""

    component: str
    """weights, kv_cache, activations, communication or runtime."""
    operator: str
    """What needs it, in the table's words or plain ones."""
    layer: int | None
    """None for what belongs to no layer."""
    amount: Amount
    source: str = ""
    """Where a range is from; empty for what a formula gives."""


@dataclass(frozen=True, slots=True)
class Need:
    """What every rank of a stage needs beside its weights, in bytes, at the workload's end of the ranges."""

    kv_cache: int
    activations: int
    communication: int
    runtime: int

    @property
    def total(self) -> int:
        """Their sum."""
        return self.kv_cache + self.activations + self.communication + self.runtime


def kv_cache(layer: Layer, model: Model, grid: Grid, workload: Workload) -> int:
    """Bytes that a rank caches for one layer (`caches.kept` has the formulas), at the workload's end of the range."""
    return total(cached(item, grid, workload) for item in kept(layer, model, grid, workload)).at(workload.assume)


def stage_items(model: Model, grid: Grid, workload: Workload, stage: int, layers: tuple[int, int]) -> tuple[Item, ...]:
    """Everything but weights that one rank of a stage needs. MTP layers are stored but not run: no cache."""
    run = [layer for layer in model.layers[layers[0] : layers[1]] if not layer.mtp]
    items = []
    for layer, amounts in _caches(run, model, grid, workload):
        items += [Item("kv_cache", operator, layer, amount, source) for operator, amount, source in amounts]
    items += _activation_items(run, model, grid, workload, stage)
    items += [
        Item("communication", operator, None, exactly(held))
        for operator, held in communication(model, grid, workload).items()
    ]
    return (*items, *_runtime_items(grid, workload))


def stage_ranges(
    model: Model, grid: Grid, workload: Workload, stage: int, layers: tuple[int, int]
) -> dict[str, Amount]:
    """Component -> bytes, low, typical and high, of each rank of a stage."""
    sums = dict.fromkeys(COMPONENTS, NOTHING)
    for item in stage_items(model, grid, workload, stage, layers):
        sums[item.component] += item.amount
    return sums


def stage_need(model: Model, grid: Grid, workload: Workload, stage: int, layers: tuple[int, int]) -> Need:
    """What a stage's ranks need beside weights, at the workload's end of the ranges."""
    found = stage_ranges(model, grid, workload, stage, layers)
    return Need(**{component: amount.at(workload.assume) for component, amount in found.items()})


def _key(layer: Layer) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((word, str(value)) for word, value in layer.words.items()))


def _caches(
    run: Iterable[Layer], model: Model, grid: Grid, workload: Workload
) -> Iterable[tuple[int, list[tuple[str, Amount, str]]]]:
    """Layer -> operator, bytes, and where a range is from."""
    known: dict[object, list[tuple[str, Amount, str]]] = {}
    for layer in run:
        key = _key(layer)
        if key not in known:
            known[key] = [
                (each.operator, cached(each, grid, workload), "" if each.certain else UNSURE_SOURCE)
                for each in kept(layer, model, grid, workload)
            ]
        yield layer.index, known[key]


def _activation_items(run: list[Layer], model: Model, grid: Grid, workload: Workload, stage: int) -> list[Item]:
    """The largest layer's peak (layers run one after the other, the tower before them), images kept, logits."""
    engine = load_engine(workload.engine)
    last = {_key(layer): layer for layer in run}  # of layers alike the last: its stream is the widest
    peaks = [(activations(layer, model, grid, workload), layer) for layer in last.values()]
    items = []
    peak, layer = max(peaks, key=lambda found: found[0], default=(0, None))
    name = f"pass of layer {layer.index}" if layer is not None else "pass"
    seen = stage == 0 and image_tokens(model, workload)
    if seen and (tower := tower_activations(model, workload)) > peak:
        peak, name = tower, "pass of the vision tower"
    factor = engine.value("activation_factor") or dict.fromkeys(ENDS, 1.0)
    ends = Amount(*(round(peak * factor[end]) for end in ENDS))
    items.append(Item("activations", name, None, ends, engine.source("activation_factor")))
    if seen:
        items.append(Item("activations", "images encoded", None, exactly(encoder_cache(model, workload))))
    if stage == grid.pp - 1:
        items.append(Item("activations", "logits", None, _sampled(model, grid, workload), engine.source("sampler")))
    return items


def _sampled(model: Model, grid: Grid, workload: Workload) -> Amount:
    """Logits, and what an engine that samples while it measures its memory makes of them."""
    known, rule = exactly(logits(model, grid, workload)), load_engine(workload.engine).value("sampler")
    if not rule:
        return known
    numbers = max(int(rule["rows"]), -(-workload.concurrency // grid.dp)) * model.sizes["vocab"]
    return Amount(*(max(known.low, numbers * int(rule[end])) for end in ENDS))


def _runtime_items(grid: Grid, workload: Workload) -> list[Item]:
    engine = load_engine(workload.engine)
    outside = "outside_group" if grid.world > 1 else "outside_one_rank"
    names = {outside: "device context and libraries", "graphs": "captured graphs", "fragmentation": "fragmentation"}
    found = [Item("runtime", words, None, engine.range(rule), engine.source(rule)) for rule, words in names.items()]
    return [item for item in found if item.amount != NOTHING]
