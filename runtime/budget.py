"""What memory a run takes in this process, part by part, from the planner's formulas, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch

from runtime.blocks.images import read_tower
from runtime.comm.devices import free_bytes
from runtime.opened import Opened
from shard_plans.errors import RuntimeFault
from shard_plans.families.model import Layer, Model
from shard_plans.memory.activations import COMPUTE, activations, stream
from shard_plans.memory.buffers import communication
from shard_plans.memory.caches import cached, kept, size
from shard_plans.memory.vision import patches, tower_activations
from shard_plans.memory.workload import Workload
from shard_plans.placement.grid import Grid

ATTENTION = {"scores": 3, "at_once": 1 << 26}
"""Copies of the scores that softmax holds, and how many of them the runtime computes at a time."""
COMPARED = 3
"""Times that a layer's activations live: of the pass, of the layer run alone, and what its operators made."""
DEQUANTISED = 3
"""Numbers in float32 for each one of a matrix that is read: itself, its scales spread out, and the result."""
MIB = 1 << 20
PROCESS = 192 * MIB
"""What allocators and libraries keep besides; measured (docs/performance.md)."""
RANK = MIB
"""The stack and the bookkeeping of a virtual rank."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a run computes."""

    tokens: int
    """Of the pass that is compared."""
    answers: tuple[int, ...]
    """Tokens of each prompt and its answer; none where nothing is generated."""
    compute: int
    """Bytes of a number."""
    kv_dtype: str
    """A name of the planner's cache types."""
    block: int
    """Tokens of a block of the cache."""
    patches: int = 0
    """Of the images."""
    blocks: int | None = None
    """Blocks that each layer reserves; None: those that are needed."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes; on the device but for `host`."""

    weights: int
    """Sections that are in memory at a time, as stored: exact."""
    matrices: int
    """The largest one as it is computed with; they are read one at a time. Twice with a reference: its matrices are of
    other sizes than those of the ranks, and an allocator keeps some of both.
    """
    kv_cache: int
    activations: int
    communication: int
    reference: int
    """The layer of the reference that runs, and the one that is read."""
    images: int
    """The vision tower's weights as stored, its pass over all patches, and what a reference keeps of its steps."""
    process: int
    """On a CPU what the process itself takes, of an accelerator nothing."""

    @property
    def total(self) -> int:
        """Their sum."""
        return sum(asdict(self).values())

    def as_dict(self) -> dict[str, int]:
        """As JSON has it."""
        return {**asdict(self), "total": self.total}


def budget(
    opened: Opened, ranks: Iterable[int], load: Load, device: torch.device, weights: int, matrix: int,
    reference: tuple[int, int] | None, tower: int = 0,
) -> Budget:  # fmt: skip
    """What running `ranks` takes. `weights`: bytes that the loader reserves; `matrix`: numbers of the largest one.

    `reference`: bytes of its largest section as stored, numbers of its largest matrix; None where none is run here.
    `tower`: bytes that the vision tower's loader reserves.
    """
    model, grid, stages = opened.model, opened.plan.grid, opened.plan.stages
    here = [grid.coordinate(rank).stage for rank in ranks]
    most = max(here.count(stage) for stage in set(here))
    last = here.count(grid.pp - 1)
    wide = max(4, load.compute)
    held = most * _activations(model, grid, load) + _scores(model, grid, load, wide)
    held += 2 * last * load.tokens * model.sizes["vocab"] * load.compute
    numbers, stored = matrix, 0
    if reference is not None:
        stored = 2 * reference[0]
        numbers = 2 * max(numbers, reference[1])
        held += COMPARED * _activations(model, Grid(), load) + _scores(model, Grid(), load, wide)
        held += 2 * load.tokens * model.sizes["vocab"] * load.compute
    return Budget(
        weights, DEQUANTISED * wide * numbers, sum(_cache(model, grid, load, stages[stage]) for stage in here), held,
        most * sum(communication(model, grid, _workload(grid, load)).values()) * load.compute // COMPUTE, stored,
        tower + _images(model, load, wide, reference is not None),
        PROCESS + RANK * len(here) if device.type == "cpu" else 0,
    )  # fmt: skip


def refuse_too_large(wanted: Budget, device: torch.device, processes: int, resident: int) -> None:
    """Raise RuntimeFault where the device, shared by `processes`, has less than the run takes; nothing was read yet."""
    free = free_bytes(device) // processes
    if free and wanted.total > free:
        raise RuntimeFault(
            f"the run takes {wanted.total} bytes of memory, {wanted.weights} of them for {resident} layers of weights; "
            f"{device} has {free} left for it: give a smaller --resident-layers, fewer tokens, or a larger device"
        )


def _workload(grid: Grid, load: Load) -> Workload:
    """The pass that is compared, as the planner describes it: every replica runs the same tokens."""
    return Workload(context=load.tokens, concurrency=grid.dp, kv_dtype=load.kv_dtype, prefill_chunk=load.tokens)


def _activations(model: Model, grid: Grid, load: Load) -> int:
    """Of one rank: what a layer holds at its peak, and the stream beside it while the layer runs alone."""
    workload = _workload(grid, load)
    peak = max(activations(layer, model, grid, workload) for layer in model.forward_layers)
    streams = load.tokens * model.sizes["hidden"] * stream(model, len(model.forward_layers))
    return (COMPARED * peak // COMPUTE + 2 * streams) * load.compute


def _scores(model: Model, grid: Grid, load: Load, wide: int) -> int:
    """Scores of attention, of the one rank that computes."""
    heads = -(-model.sizes.get("heads", 0) // grid.tp)
    return ATTENTION["scores"] * wide * min(heads * load.tokens**2, max(ATTENTION["at_once"], heads * load.tokens))


def _images(model: Model, load: Load, wide: int, reference: bool) -> int:
    """Of a vision tower's pass, whole on a rank; and of what is compared with it, which ranks of a process share."""
    if not load.patches:
        return 0
    count, heads, vt = load.patches, read_tower(model).heads, size(model, "vt")
    tokens = -(-count // patches(model))
    made = tower_activations(model, Workload(image_tokens=tokens)) * wide // COMPUTE
    made += ATTENTION["scores"] * wide * min(heads * count**2, max(ATTENTION["at_once"], heads * count))
    if reference:
        blocks = vt * (2 * size(model, "vt_count") + 4) + model.sizes.get("vt_qkv", vt) // heads
        made += wide * (count * blocks + tokens * model.sizes["hidden"] * (1 + model.sizes.get("deepstack", 0)))
    return made


def _cache(model: Model, grid: Grid, load: Load, layers: tuple[int, int]) -> int:
    """Of one rank: whole blocks for each answer, or as many as each layer reserves, and states."""

    def of(layer: Layer, tokens: int) -> list[int]:
        whole = -(-tokens // load.block) * load.block
        workload = Workload(context=whole, concurrency=grid.dp, kv_dtype=load.kv_dtype, prefill_chunk=whole)
        return [cached(item, grid, workload).high for item in kept(layer, model, grid, workload)]

    def reserved(layer: Layer) -> list[int]:
        workload = Workload(concurrency=grid.dp, kv_dtype=load.kv_dtype)
        paged = (item.record if item.every == 1 else 0 for item in kept(layer, model, grid, workload))
        return [(load.blocks or 0) * load.block * record for record in paged]

    run = [layer for layer in model.forward_layers if layers[0] <= layer.index < layers[1]]
    if not load.answers:
        return 0
    needed = ([sum(items) for items in zip(*(of(layer, each) for each in load.answers), strict=True)] for layer in run)
    return sum(sum(map(max, need, reserved(layer))) for layer, need in zip(run, needed, strict=True))
