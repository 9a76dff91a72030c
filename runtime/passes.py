"""One forward pass of one rank over all sections: stage after stage, layers from the loader as they arrive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from runtime.blocks import forward, towers
from runtime.blocks.cache import LayerCache
from runtime.blocks.forward import RankContext, Routing
from runtime.blocks.images import Images
from runtime.blocks.pages import Pool
from runtime.blocks.piece import Caches, Piece, ids_of
from runtime.blocks.places import beside_images
from runtime.blocks.probe import NOBODY, Probe
from runtime.blocks.weights import LayerWeights
from runtime.comm.devices import synchronize
from runtime.hand_over import hand_over
from runtime.loading.loader import Loader
from runtime.loading.sections import FIRST, LAST
from runtime.timeline import Timeline
from shard_plans.errors import RuntimeFault
from shard_plans.families.model import Layer


class Watcher(Protocol):
    """Sees a pass from within; every rank calls the same methods in the same order."""

    def looked(self, weights: LayerWeights, images: Images, deep: Tensor | None) -> None:
        """Called on the ranks of the first stage when the tower has looked, while its weights are in memory.

        `deep`: what early layers will add to the images' tokens [layers, tokens, hidden], if anything.
        """

    def placed(self, tokens: Tensor, x: Tensor) -> None:
        """Called there too, where images took the place of some `tokens` of the stream x."""

    def before(self, layer: Layer) -> Probe:
        """Called on all ranks, those of other stages too, before `layer` runs; what it returns sees the layer run."""

    def after(self, layer: Layer, weights: LayerWeights, start: Tensor, out: Tensor, routing: Routing | None) -> None:
        """Called on the ranks of the layer's stage, while its weights are in memory."""


@dataclass(frozen=True, slots=True, eq=False)
class RankRun:
    """What one rank needs to run passes."""

    ctx: RankContext
    loader: Loader
    stages: tuple[tuple[int, int], ...]
    """Half-open layer range of each stage."""
    lockstep: bool
    """Ranks share the loader and memory: nobody starts a section before all have left the one before it."""
    tower: Loader | None = None
    """Loads the vision tower; None where there are no images, or no rank of the first stage."""
    timeline: Timeline | None = None
    """Told when each section ran."""

    @property
    def is_last(self) -> bool:
        """Whether this rank's stage has the head."""
        return self.ctx.at.stage == len(self.stages) - 1

    @property
    def output_rank(self) -> int:
        """The rank whose logits count: tp 0 of replica 0 on the last stage."""
        return self.ctx.grid.world - self.ctx.grid.stage_ranks

    @property
    def gives_scores(self) -> bool:
        """Whether this is tp 0 of a replica on the last stage: its logits stand for the replica's."""
        return self.is_last and self.ctx.at.tp == 0

    def stage_of(self, layer: int) -> int:
        """The stage that runs a layer."""
        return next(stage for stage, (first, stop) in enumerate(self.stages) if first <= layer < stop)

    @property
    def layers(self) -> list[Layer]:
        """Those of this rank's stage."""
        every = self.ctx.model.forward_layers
        return [layer for layer in every if self.stage_of(layer.index) == self.ctx.at.stage]

    def new_caches(self, pools: Mapping[int, Pool] | None = None) -> dict[int, LayerCache]:
        """Empty caches of one sequence for these layers, in blocks of each layer's pool, or of pools of their own."""
        return {layer.index: LayerCache(None if pools is None else pools[layer.index]) for layer in self.layers}

    def now(self) -> float:
        """Seconds on the timeline, when the device has done all that was asked of it; 0 without one."""
        if self.timeline is None:
            return 0.0
        synchronize(self.ctx.device)
        return self.timeline.now()

    def note(self, section: int, asked: float, got: float, ran: float) -> None:
        """Tell the timeline of a section that is done with."""
        if self.timeline is not None:
            self.timeline.note(section, asked, got, ran, self.loader.resident)

    def step(self) -> None:
        """The end of a section."""
        if self.lockstep:
            self.ctx.comm.barrier()


def next_piece(
    run: RankRun, ids: Tensor, positions: Tensor, caches: Caches | None, images: Images | None = None, shift: int = 0,
    prompt: int | None = None,
) -> Piece:  # fmt: skip
    """A piece of a sequence: ids [tokens] at `positions`, with the images that they hold placeholders of.

    `shift`: by how much images before these tokens move their places (runtime/blocks/places.py).
    `prompt`: how many of the ids were given, and may stand for images; None: all.
    """
    beside = beside_images(run.ctx.model, ids, images, prompt)
    if shift:
        beside.places = (positions + shift).expand(3, -1)
    return Piece(positions, beside, caches)


def batch_pass(
    run: RankRun, pieces: Sequence[Piece], watch: Watcher | None = None, images: Images | None = None,
    rows: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """Run pieces of several sequences at once: logits [rows, vocabulary] on the last stage, None on the others.

    Rows lie one piece behind the other; `rows` are those whose logits are wanted, None: all. `images` are those of a
    piece that is alone. `watch` may be None on all ranks or on none.
    """
    x = _embed(run, pieces, images, watch) if run.ctx.at.stage == 0 else None
    run.step()
    reached = 0
    for layer in run.ctx.model.forward_layers:
        stage = run.stage_of(layer.index)
        while reached < stage:
            x, reached = hand_over(run.ctx, run.stages, reached, x, pieces), reached + 1
        probe = NOBODY if watch is None else watch.before(layer)
        if x is not None:
            x = _layer(run, layer, x, pieces, watch, probe)
        run.step()
    while reached < len(run.stages) - 1:
        x, reached = hand_over(run.ctx, run.stages, reached, x, pieces), reached + 1
    scores = None if x is None else _logits(run, x if rows is None else x[rows])
    run.step()
    return scores


def _embed(run: RankRun, pieces: Sequence[Piece], images: Images | None, watch: Watcher | None) -> Tensor:
    rank, seen, ids = run.ctx.at.rank, None, ids_of(pieces)
    if ids is None:
        raise RuntimeFault(f"rank {rank} was given no token ids")
    if images is not None:
        if run.tower is None:
            raise RuntimeFault(f"rank {rank} was given images, and no vision tower")
        tower = run.tower.get(rank, FIRST)
        seen = towers.see(run.ctx, tower, images, ids, pieces[0].beside)
        if watch is not None:
            watch.looked(tower, images, pieces[0].beside.deep)
        del tower
        run.tower.release(rank, FIRST)
    asked = run.now()
    weights = run.loader.get(rank, FIRST)
    got = run.now()
    x = forward.embed(run.ctx, weights, ids, seen)
    run.note(FIRST, asked, got, run.now())
    run.loader.release(rank, FIRST)
    if seen is not None and watch is not None:
        watch.placed(seen[0], x)
    return x


def _layer(
    run: RankRun, layer: Layer, start: Tensor, pieces: Sequence[Piece], watch: Watcher | None, probe: Probe
) -> Tensor:
    rank = run.ctx.at.rank
    asked = run.now()
    run.ctx.pulse.enter(f"layer {layer.index}")
    run.ctx.pulse.begin("reading its weights")
    weights = run.loader.get(rank, layer.index)
    got = run.now()
    out, routing = forward.run_pieces(run.ctx, layer, weights, start, pieces, probe)
    ran = run.now()
    if watch is not None:
        watch.after(layer, weights, start, out, routing)
    run.note(layer.index, asked, got, ran)
    run.loader.release(rank, layer.index)
    return out


def _logits(run: RankRun, x: Tensor) -> Tensor:
    rank = run.ctx.at.rank
    asked = run.now()
    weights = run.loader.get(rank, LAST)
    got = run.now()
    scores = forward.logits(run.ctx, weights, x)
    run.note(LAST, asked, got, run.now())
    run.loader.release(rank, LAST)
    return scores
