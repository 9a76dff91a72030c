"""Exact bytes of what ranks hold, from headers alone: each distinct parameter is cut once a share, and counted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

from shard_plans.checkpoints.dtypes import DTYPE_BITS
from shard_plans.documents.plan import Plan
from shard_plans.families.binding import Binding
from shard_plans.families.dims import Share
from shard_plans.families.parameter import Parameter
from shard_plans.placement.cuts import Cutter
from shard_plans.placement.precision import in_precision

Key = tuple[object, ...]
Counts = tuple[tuple[Key, int], ...]


class Payload:
    """Bytes of a binding's layers under any parallel sizes; agrees to the byte with what `place` lays out."""

    def __init__(self, binding: Binding, strict_blocks: bool = False, weights: Mapping[str, str] | None = None) -> None:
        """`strict_blocks` makes every cut inside a quantisation block a PlanError; `weights` are those of the plan."""
        self.weights = dict(weights or {})
        self.binding = binding = in_precision(binding, self.weights)
        self.strict_blocks = strict_blocks
        self._cutter = Cutter(binding.model, binding.family.uneven, strict_blocks)
        self._examples: dict[Key, Parameter] = {}
        self._known: dict[tuple[Counts, str, Share], int] = {}
        model, parameters = binding.model, binding.parameters
        layered: dict[tuple[int, bool], list[Parameter]] = {}
        for parameter in parameters:
            if parameter.layer is not None:
                layered.setdefault((parameter.layer, parameter.per_expert), []).append(parameter)
        layers = [layer.index for layer in model.layers]
        self._shared = {layer: self._count(layered.get((layer, False), ())) for layer in layers}
        self._expert = {layer: self._count(layered.get((layer, True), ())) for layer in layers}
        outside = [p for p in parameters if p.layer is None]
        self._first = self._count(p for p in outside if p.stage != "last")
        self._last = self._count(p for p in outside if p.stage == "last")
        self._tied = self._count(p for p in outside if p.role == "embed" and model.tied)

    def _count(self, parameters: Iterable[Parameter]) -> Counts:
        counts: Counter[Key] = Counter()
        for parameter in parameters:
            parts = tuple((part.kind, part.dtype, part.shape) for part in parameter.parts)
            key: Key = (parameter.role, tuple(dim.text for dim in parameter.dims), parameter.block, parts)
            self._examples.setdefault(key, parameter)
            counts[key] += 1
        return tuple(counts.items())

    def _bytes(self, counts: Counts, axis: str, share: Share) -> int:
        found = self._known.get((counts, axis, share))
        if found is None:
            found = 0
            for key, times in counts:
                cut = self._cutter.cut(self._examples[key], {axis: share})
                found += times * sum(math.prod(p.shape) * DTYPE_BITS[p.part.dtype] // 8 for p in cut.parts)
            self._known[counts, axis, share] = found
        return found

    def operators(
        self, layer: int | None, tp: Share, etp: Share, experts: int, ends: tuple[bool, bool]
    ) -> dict[str, int]:
        """Role -> bytes of a layer with so many experts; layer None: of what the `ends`, first and last stage, hold."""
        if layer is not None:
            parts = [(self._shared[layer], "tp", tp, 1), (self._expert[layer], "etp", etp, experts)]
        else:
            tied = ends == (False, True)
            parts = [(self._first, "tp", tp, ends[0]), (self._last, "tp", tp, ends[1]), (self._tied, "tp", tp, tied)]
        found: Counter[str] = Counter()
        for counts, axis, share, times in parts:
            for key, number in counts if times else ():
                found[str(key[0])] += times * self._bytes(((key, number),), axis, share)
        return dict(found)

    def layer(self, layer: int, tp: Share) -> int:
        """What a tp member holds of a layer, its experts not counted."""
        return self._bytes(self._shared[layer], "tp", tp)

    def expert(self, layer: int, etp: Share) -> int:
        """What an etp member holds of one expert of a layer; 0 in a layer without experts."""
        return self._bytes(self._expert[layer], "etp", etp)

    def first(self, tp: Share) -> int:
        """What a tp member of the first stage holds outside the layers: the embedding and a vision tower."""
        return self._bytes(self._first, "tp", tp)

    def last(self, tp: Share, apart: bool) -> int:
        """What a tp member of the last stage holds outside the layers: norm, head; `apart`: pp is above 1."""
        return self._bytes(self._last, "tp", tp) + (self._bytes(self._tied, "tp", tp) if apart else 0)


def rank_weights(payload: Payload, plan: Plan) -> tuple[int, ...]:
    """Payload bytes of each rank's files, in rank order."""
    grid = plan.grid
    totals: list[int] = []
    for stage, (first, stop) in enumerate(plan.stages):
        shared = []
        for index in range(grid.tp):
            tp = Share(index, grid.tp)
            held = sum(payload.layer(layer, tp) for layer in range(first, stop))
            held += payload.first(tp) if stage == 0 else 0
            held += payload.last(tp, grid.pp > 1) if stage == grid.pp - 1 else 0
            shared.append(held)
        by_layer = [
            (plan.experts.slots(layer, grid), [payload.expert(layer, Share(etp, grid.etp)) for etp in range(grid.etp)])
            for layer in range(first, stop)
            if payload.expert(layer, Share(0, grid.etp))
        ]
        experts: dict[tuple[int, int], int] = {}
        for at in grid.coordinates()[stage * grid.stage_ranks : (stage + 1) * grid.stage_ranks]:
            slot = at.edp * grid.ep + at.ep
            if (slot, at.etp) not in experts:
                experts[slot, at.etp] = sum(len(slots[slot]) * sizes[at.etp] for slots, sizes in by_layer)
            totals.append(shared[at.tp] + experts[slot, at.etp])
    return tuple(totals)
