"""The verification ladder on one rank: each layer alone with the reference's own input, and end to end."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from runtime.blocks import forward, stream
from runtime.blocks.forward import Routing
from runtime.blocks.images import Images
from runtime.blocks.places import beside_images
from runtime.blocks.weights import LayerWeights
from runtime.checking.checks import Measure, worst
from runtime.checking.compare import NOISE, Routed, compare_routing, cosine, layer_error, relative, relative_margin
from runtime.checking.reference import Record, Reference
from runtime.hand_over import deep_shape, picks_before
from runtime.passes import RankRun
from shard_plans.console import Advance
from shard_plans.families.model import Layer

DRIFT = 10.0
"""How many times the error so far may move a score before a changed route is no longer put down to rounding."""


def exact(compute: torch.dtype) -> bool:
    """Whether errors in this type are small enough for the strict limits."""
    return compute in (torch.float32, torch.float64)


def reference_dtype(compute: torch.dtype) -> torch.dtype:
    """The reference's arithmetic: float32, or float64 where the ranks use it."""
    return torch.float64 if compute == torch.float64 else torch.float32


class Ladder:
    """Watches a pass of one rank. Rank 0 runs the reference and hands each layer's result to all.

    Without a reference it only notes near-ties, after which replicas may differ.
    """

    def __init__(
        self,
        run: RankRun,
        ids: Tensor,
        compare: bool,
        reference: Reference | None,
        images: Images | None = None,
        advance: Advance | None = None,
    ) -> None:
        """`compare`: there is a reference, which is given on rank 0 alone; `advance` is told of every layer."""
        self._advance = advance
        self.run, self.ctx = run, run.ctx
        self._compare, self._reference = compare, reference
        self._wide = reference_dtype(run.ctx.compute)
        self._tokens, self._beside = len(ids), beside_images(self.ctx.model, ids, images)
        self._positions = torch.arange(len(ids), device=run.ctx.device)
        self._start = self._out = torch.empty(0)
        if compare:
            self._out = self._share(None if reference is None else reference.begin(ids, images))
            if self._beside.tokens is not None and self.ctx.model.sizes.get("deepstack"):
                deep = None if reference is None else reference.beside.deep
                shape = deep_shape(self.ctx.model, self._beside.tokens)
                self._beside.deep = self.ctx.comm.broadcast(deep, 0, shape, self._wide)
        self._routing: tuple[Tensor, Tensor] | None = None
        self._drift = 0.0
        self.clean = len(ids)
        """Tokens before the first that a near-tie sent elsewhere; later ones can't be compared end to end."""
        self.untied = len(ids)
        """Tokens before the first whose route in this rank's own pass was a near-tie."""
        self.ties = 0
        """Tokens and layers in which a near-tie chose another expert, fed with the reference's own input."""
        self.wrong = self.routed = 0
        """The same where the margin was too large for that (in low precision: whatever the margin); and all of them."""
        self.chosen: dict[int, int] = {}
        """Layer -> how many of its experts some token chose; on rank 0."""
        self._worst: dict[str, Measure] = {}

    @property
    def measures(self) -> list[Measure]:
        """The worst of each kind."""
        return list(self._worst.values())

    def placed(self, tokens: Tensor, x: Tensor) -> None:
        """Compare what the images became."""
        if not self._compare:
            return
        where, ours, theirs = f"rank {self.ctx.at.rank}", x[tokens], self._out[tokens]
        if exact(self.ctx.compute):
            error, row = layer_error(torch.zeros_like(theirs), ours, theirs)
            self._note("vision", error, f"{where}, token {int(tokens[row])}")
        else:
            self._note("vision", cosine(ours, theirs), where, high=False)

    def before(self, layer: Layer) -> None:
        """Run the reference's layer and hand its result round."""
        if not self._compare:
            return
        record: Record | None = None if self._reference is None else self._reference.next_layer()
        self._start, self._out = self._out, self._share(None if record is None else record.out)
        self._routing = None
        if layer.words.get("index") == "previous":
            shape = (self._tokens, min(self._tokens, picks_before(self.ctx.model, layer.index)))
            picked = None if record is None else record.beside.picked
            self._beside.picked = self.ctx.comm.broadcast(picked, 0, shape, torch.int64)
        if layer.words.get("ffn") == "moe":
            found = record.routing if record is not None else None
            comm, tokens = self.ctx.comm, self._tokens
            ids = comm.broadcast(
                None if found is None else found.indices, 0, (tokens, self.ctx.size("topk")), torch.int64
            )  # fmt: skip
            mine = None if found is None else relative_margin(found).to(self.ctx.device, torch.float32)
            margin = comm.broadcast(mine, 0, (tokens,), torch.float32)
            self._routing = (ids, margin)
            if found is not None:
                self.chosen[layer.index] = len(set(found.indices.flatten().tolist()))

    def after(self, layer: Layer, weights: LayerWeights, start: Tensor, out: Tensor, routing: Routing | None) -> None:
        """Compare the layer's result end to end, then run it again on the reference's own input."""
        if self._advance is not None and self.ctx.at.dp == self.ctx.at.tp == 0:
            self._advance(layer.index + 1, len(self.ctx.model.forward_layers))
        if routing is not None:
            near = relative_margin(routing) <= NOISE[self.ctx.compute]
            self.untied = min(self.untied, *near.nonzero().flatten().tolist(), self._tokens)
        if not self._compare:
            return
        alone, alone_routing = forward.run_layer(
            self.ctx, layer, weights, self._start.to(self.ctx.compute), None, self._positions, self._beside
        )
        where = f"layer {layer.index}, rank {self.ctx.at.rank}"
        if alone.shape != self._out.shape or out.shape != self._out.shape:
            self._note_shape(where, alone, out)
        elif exact(self.ctx.compute):
            self._compare_exact(where, layer, out, routing, alone, alone_routing)
        else:
            self._note("layers", cosine(alone, self._out), where, high=False)
            self._note("hidden", cosine(out, self._out), where, high=False)
            if self._routing is not None and alone_routing is not None:
                routed = self._routed(alone_routing, -1.0)
                self.wrong, self.routed = self.wrong + len(routed.wrong), self.routed + routed.tokens
                self._note("routing", 1 - len(routed.wrong) / max(1, routed.tokens), where, high=False)

    def _compare_exact(
        self, where: str, layer: Layer, out: Tensor, routing: Routing | None, alone: Tensor,
        alone_routing: Routing | None,
    ) -> None:  # fmt: skip
        kept = torch.ones(self._tokens, dtype=torch.bool)
        experts: Tensor | None = None
        if self._routing is not None and routing is not None and alone_routing is not None:
            noise = NOISE[self.ctx.compute]
            routed = self._routed(alone_routing, noise)
            self._note("routing", float(len(routed.wrong)), self._routed_words(where, routed, alone_routing))
            self.wrong, self.routed = self.wrong + len(routed.wrong), self.routed + routed.tokens
            self.ties += len(routed.ties)
            kept[list(routed.ties)] = False
            experts = alone_routing.indices
            drifted = self._routed(routing, max(noise, DRIFT * min(self._drift, NOISE[torch.float32] * 100)))
            self.clean = min(self.clean, *drifted.ties, self._tokens)
        if bool(kept.any()):
            rows = kept.nonzero().flatten()
            base = stream.carry(self.ctx.model, layer, self._start)
            error, row = layer_error(base.cpu()[rows], alone.cpu()[rows], self._out.cpu()[rows])
            token = int(rows[row])
            words = f"{where}, token {token}"
            if experts is not None:
                words += f" (experts {', '.join(map(str, experts[token].tolist()))})"
            self._note("layers", error, words)
        if self.clean:
            self._drift = relative(out[: self.clean], self._out[: self.clean])
            self._note("hidden", self._drift, where)

    def _routed(self, ours: Routing, noise: float) -> Routed:
        assert self._routing is not None
        ids, margin = self._routing
        return compare_routing(ours.indices, ids, margin, noise)

    def _routed_words(self, where: str, routed: Routed, ours: Routing) -> str:
        if not routed.wrong:
            return f"{where}, smallest margin {routed.margin:.1e}"
        assert self._routing is not None
        token = routed.wrong[0]
        ids, margin = self._routing
        return (
            f"{where}, token {token}: experts {sorted(ours.indices[token].tolist())}, the reference chose "
            f"{sorted(ids[token].tolist())} by a margin of {float(margin[token]):.1e}"
        )

    def _note_shape(self, where: str, alone: Tensor, out: Tensor) -> None:
        """Streams of another width than the reference's can't be compared; that they differ is the finding."""
        high = exact(self.ctx.compute)
        for check, x in (("layers", alone), ("hidden", out)):
            if x.shape != self._out.shape:
                words = f"{where}: {x.shape[1]} vectors a token, the reference has {self._out.shape[1]}"
                self._note(check, math.inf if high else -1.0, words, high)

    def _share(self, x: Tensor | None) -> Tensor:
        """Rank 0's stream on all ranks. How wide it is the reference says: a rank's own model may be wrong there."""
        comm, hidden = self.ctx.comm, self.ctx.size("hidden")
        if stream.vectors(self.ctx.model, 0) is None:
            return comm.broadcast(x, 0, (self._tokens, hidden), self._wide)
        mine = None if x is None else torch.tensor([x.shape[1]], device=x.device)
        width = int(comm.broadcast(mine, 0, (1,), torch.int64))
        return comm.broadcast(x, 0, (self._tokens, width, hidden), self._wide)

    def _note(self, check: str, value: float, where: str, high: bool = True) -> None:
        new = Measure(check, value, where)
        known = self._worst.get(check)
        self._worst[check] = new if known is None else worst([known, new], high) or new
