"""How many tokens a cache of a given size holds, counted as the engine counts and prints it.

vLLM (kv_cache_utils.py): layers that keep alike things form groups of equally many layers; a block is one page in every
layer of a group, so all pages are made equal. SGLang: a pool a kind of layer, sized in tokens.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from shard_plans.errors import PlanError
from shard_plans.families.model import Layer, Model
from shard_plans.memory.amount import total
from shard_plans.memory.caches import Kept, cached, kept
from shard_plans.memory.engine import Engine, load_engine
from shard_plans.memory.workload import Workload
from shard_plans.placement.grid import Grid

GROUPS_MAY_WASTE = 1.5
"""Groups take the size of the largest kind of layer while that is below so many times the smallest."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Layers that keep alike things."""

    records: int
    """Bytes a token in one layer, its window or its whole length."""
    state: int
    window: int | None
    layers: int


def pool_tokens(model: Model, grid: Grid, workload: Workload, layers: tuple[int, int], room: int) -> int:
    """Tokens that the engine of `workload` prints for `room` bytes of cache on a rank of the stage with these layers.

    `context` is the longest sequence, `prefill_chunk` the tokens in flight in one step. 0 where not one page fits.
    Where the cache is uncertain: sequences of that length that fit by the typical end, times their tokens.
    """
    kinds, engine = _kinds(model, grid, workload, layers), load_engine(workload.engine)
    if not kinds:
        raise PlanError(f"layers {layers[0]} to {layers[1] - 1} keep no cache, so no tokens can be counted")
    items = [each for layer in _run(model, layers) for each in kept(layer, model, grid, workload)]
    if not all(item.certain for item in items):
        one = replace(workload, concurrency=1)
        return int(room / max(1, total(cached(item, grid, one) for item in items).typical) * workload.context)
    block = int(engine.value("kv_block", 1))
    if all(kind.window is None and not kind.state for kind in kinds):
        page = block * sum(kind.records * kind.layers for kind in kinds)
        return max(0, room // page - int(engine.value("kv_spare_pages", 0))) * block
    if "kv_report" in engine.rules:
        return _grouped(kinds, workload, room, engine)
    return _pooled(kinds, workload, room, float(engine.value("window_ratio", 1)))


def _kinds(model: Model, grid: Grid, workload: Workload, layers: tuple[int, int]) -> list[Kind]:
    counts: Counter[tuple[int, int, int | None]] = Counter()
    for layer in _run(model, layers):
        items = kept(layer, model, grid, workload)
        counts[_records(items), sum(item.state for item in items), _window(items)] += 1
    return [Kind(records, state, window, number) for (records, state, window), number in counts.items()]


def _run(model: Model, layers: tuple[int, int]) -> list[Layer]:
    return [layer for layer in model.layers[layers[0] : layers[1]] if not layer.mtp]


def _records(items: tuple[Kept, ...]) -> int:
    return sum(-(-item.record // item.every) for item in items)


def _window(items: tuple[Kept, ...]) -> int | None:
    return max((item.window for item in items if item.window is not None), default=None)


def _grouped(kinds: list[Kind], workload: Workload, room: int, engine: Engine) -> int:
    """Kinds that differ, as vLLM counts them: pages are made equal by longer blocks, states are padded to a page."""
    block, report = int(engine.value("kv_block", 1)), engine.value("kv_report")
    tokens = [kind for kind in kinds if kind.records]
    page = max((kind.records for kind in tokens), default=0) * block
    state = max((kind.state for kind in kinds), default=0)
    if state and tokens:
        block = hybrid_block(min(kind.records for kind in tokens), state, block)
        page = max(kind.records for kind in tokens) * block
    page = max(page, state)
    blocks = {kind: page // kind.records if kind.records else 0 for kind in kinds}
    fewest, most = min(kind.layers for kind in kinds), max(kind.layers for kind in kinds)
    size = most if most < GROUPS_MAY_WASTE * fewest else fewest
    groups = {kind: -(-kind.layers // size) for kind in kinds}
    number = room // (size * page)
    if report == "blocks_by_group":
        return number // sum(groups.values()) * min(length for length in blocks.values() if length)
    needed = 0
    for kind in kinds:
        held = workload.context
        if kind.window is not None:
            held = min(kind.window - 1 + workload.prefill_chunk, held)
        pages = -(-held // blocks[kind]) + (kind.window is not None) if blocks[kind] else 0
        pages = max(pages, int(engine.value("state_blocks", 1))) if kind.state else pages
        needed += groups[kind] * pages
    return int(number / needed * workload.context)


def hybrid_block(record: int, state: int, block: int) -> int:
    """Tokens of an attention block whose page holds a recurrent state: a multiple of the engine's own block."""
    return max(block, -(-state // (record * block)) * block)


def _pooled(kinds: list[Kind], workload: Workload, room: int, ratio: float) -> int:
    """SGLang: layers with a window get a part of the tokens of the full ones; states come out of the room first."""
    sequences = workload.concurrency
    room -= sequences * sum(kind.state * kind.layers for kind in kinds)
    each = sum(kind.records * kind.layers * (1 if kind.window is None else ratio) for kind in kinds)
    return max(0, int(room / each)) if each else 0
