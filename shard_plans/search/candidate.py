"""One grid as the search sees it: bytes and seconds by layer, summed once, and the stages that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

from shard_plans.cost.model import CostModel, Times
from shard_plans.cost.prediction import Prediction, predict
from shard_plans.documents.plan import Plan
from shard_plans.documents.plan_check import plan_source
from shard_plans.families.binding import Binding
from shard_plans.families.dims import Share
from shard_plans.memory.engine import load_engine
from shard_plans.memory.needs import activations, kv_cache, logits, stage_need
from shard_plans.memory.payload import Payload
from shard_plans.memory.resident import Extras, Resident
from shard_plans.memory.workload import Workload
from shard_plans.placement.grid import Grid
from shard_plans.search.grids import expert_count
from shard_plans.search.stages import Stages, balance, balance_within

Known = dict[tuple[str, int], list[int]]
"""("layer", tp) or ("expert", etp) -> bytes of each layer, or of one expert of each, for the first member."""


@dataclass(frozen=True, slots=True)
class Outline:
    """Bytes of a grid's layers on its fullest rank, before any stages are cut."""

    costs: tuple[int, ...]
    """Weights and cache of each layer that runs."""
    first: int
    last: int
    """What the first and the last stage hold beside: embedding and tower; head, logits, layers that don't run."""

    @property
    def least(self) -> int:
        """All bytes of one stage's ranks, for a lower bound of the fullest stage's."""
        return sum(self.costs) + self.first + self.last


@dataclass(frozen=True, slots=True)
class Candidate:
    """One grid with its stages, the bytes that its fullest rank needs, and its predicted speed."""

    grid: Grid
    stages: Stages
    """Over all kept layers."""
    need: int
    prediction: Prediction | None


class Outlines:
    """Outlines and candidates of one binding and workload."""

    def __init__(
        self,
        binding: Binding,
        payload: Payload,
        workload: Workload,
        mtp: str,
        alone: bool = False,
        known: Known | None = None,
    ) -> None:
        """`alone` leaves out everything but weights: what no workload can do without.

        `known` is kept and shared by questions that differ in the workload alone.
        """
        self.binding, self.payload, self.workload, self.mtp = binding, payload, workload, mtp
        self.alone = alone
        self.known = {} if known is None else known
        self._caches: dict[tuple[int, int], list[int]] = {}
        self._resident: dict[tuple[int, int, int, bool], Extras] = {}
        self._engine = Resident(payload, Plan(plan_source(binding), Grid(), ((0, 1),), workload=workload))
        model = binding.model
        kinds: dict[object, int] = {}
        self._kinds = []
        for layer in model.forward_layers:
            words = tuple(sorted((word, str(value)) for word, value in layer.words.items()))
            self._kinds.append(kinds.setdefault(words, len(kinds)))
        self._examples = [model.forward_layers[self._kinds.index(kind)] for kind in range(len(kinds))]

    def outline(self, grid: Grid) -> Outline:
        """Bytes by layer of one grid; PlanError where a cut isn't possible."""
        model, tp = self.binding.model, Share(0, grid.tp)
        extras = self._extras(grid)
        weights = [held + more for held, more in zip(self._layer_weights(grid), extras.layers, strict=True)]
        caches = self._layer_caches(grid)
        forward = len(model.forward_layers)
        costs = tuple(weights[layer.index] + caches[self._kinds[at]] for at, layer in enumerate(model.forward_layers))
        kept = self.mtp == "keep" and load_engine(self.workload.engine).value("mtp") != "drop"
        last = self.payload.last(tp, grid.pp > 1) + (sum(weights[forward:]) if kept else 0)
        return Outline(costs, self.payload.first(tp) + extras.first, last + extras.last + self._logits(grid))

    def candidate(
        self, grid: Grid, outline: Outline, model: CostModel | None = None, times: Times | None = None, room: int = 0
    ) -> Candidate:
        """Stages and need of a grid: balanced by time within `room` bytes where it is timed, else by bytes alone."""
        layers = self.binding.model.forward_layers
        peaks = [] if self.alone else [activations(layer, self.binding.model, grid, self.workload) for layer in layers]
        ends = (outline.first, outline.last)
        if model is None or times is None:
            stages = balance(outline.costs, grid.pp, *ends, peaks)
            prediction = None
        else:
            seconds = [time.total for time in times.decode]
            beside = stage_need(self.binding.model, grid, self.workload, 0, (0, 1))
            stages = balance_within(
                seconds, (times.decode_ends[0].total, times.decode_ends[1].total),
                outline.costs, ends, peaks, grid.pp, room - beside.communication - beside.runtime,
            )  # fmt: skip
            prediction = predict(model, times, grid, stages, self.workload)
        need = 0
        for stage, (start, stop) in enumerate(stages):
            held = sum(outline.costs[start:stop]) + (outline.first if stage == 0 else 0)
            if stage == grid.pp - 1:
                held += outline.last - self._logits(grid)
            need = max(need, held + self._beside(grid, stage, (start, stop)))
        kept = len(self.binding.model.layers) if self.mtp == "keep" else len(layers)
        return Candidate(grid, (*stages[:-1], (stages[-1][0], kept)), need, prediction)

    def _layer_caches(self, grid: Grid) -> list[int]:
        """Bytes that a rank caches for a layer of each kind; only tp and dp decide."""
        key = (grid.tp, grid.dp)
        if key not in self._caches:
            model, load = self.binding.model, self.workload
            self._caches[key] = [0 if self.alone else kv_cache(layer, model, grid, load) for layer in self._examples]
        return self._caches[key]

    def _logits(self, grid: Grid) -> int:
        return 0 if self.alone else logits(self.binding.model, grid, self.workload)

    def least(self, grid: Grid, outline: Outline) -> int:
        """Bytes that the fullest rank needs at least, however the stages are cut."""
        if self.alone:
            return outline.least // grid.pp
        need = stage_need(self.binding.model, grid, self.workload, grid.pp - 1, (0, 0))
        return outline.least // grid.pp + need.communication + need.runtime + self._extras(grid).everywhere

    def _beside(self, grid: Grid, stage: int, layers: tuple[int, int]) -> int:
        """Bytes of a stage's ranks beside weights and cache, which the costs hold already."""
        if self.alone:
            return 0
        need = stage_need(self.binding.model, grid, self.workload, stage, layers)
        return need.total - need.kv_cache + self._extras(grid).everywhere

    def _extras(self, grid: Grid) -> Extras:
        """What the engine makes of the weights beside what is read; nothing where weights alone are asked for."""
        key = (grid.tp, grid.ep, grid.etp, grid.pp > 1)
        if key not in self._resident:
            if self.alone:
                self._resident[key] = Extras((0,) * len(self.binding.model.layers), 0, 0, 0)
            else:
                self._resident[key] = self._engine.extras(grid)
        return self._resident[key]

    def _layer_weights(self, grid: Grid) -> list[int]:
        """Bytes of each kept layer on the fullest rank."""
        layers = self.binding.model.layers
        shared, single = ("layer", grid.tp), ("expert", grid.etp)
        if shared not in self.known:
            self.known[shared] = [self.payload.layer(layer.index, Share(0, grid.tp)) for layer in layers]
        if single not in self.known:
            self.known[single] = [self.payload.expert(layer.index, Share(0, grid.etp)) for layer in layers]
        held = -(-expert_count(self.binding) // grid.ep)
        pairs = zip(self.known[shared], self.known[single], strict=True)
        return [layer + held * expert for layer, expert in pairs]
