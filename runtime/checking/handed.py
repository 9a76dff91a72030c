"""The reference's results on every rank: rank 0 runs it, layer by layer, and hands round what it made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.blocks import stream
from runtime.blocks.beside import Beside
from runtime.blocks.context import RankContext
from runtime.blocks.images import Images
from runtime.blocks.places import whole_pieces
from runtime.checking.checks import gather
from runtime.checking.compare import relative_margin
from runtime.checking.probes import Routes, operators
from runtime.checking.reference import Record, Reference
from runtime.hand_over import deep_shape, picks_before
from shard_plans.families.model import Layer


def reference_dtype(compute: torch.dtype) -> torch.dtype:
    """The reference's arithmetic: float32, or float64 where the ranks use it."""
    return torch.float64 if compute == torch.float64 else torch.float32


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """What the reference made of one layer, on this rank."""

    start: Tensor
    """The stream into the layer [tokens, .., hidden]."""
    out: Tensor
    """The stream out of it."""
    made: Mapping[str, Tensor]
    """Operator -> what it made of all tokens."""
    routes: Routes | None
    """Where the tokens went, if the layer is a mixture of experts."""


class Handed:
    """The reference's pass as every rank sees it, and only sees; all ranks make the same calls in the same order."""

    def __init__(
        self, ctx: RankContext, texts: Sequence[Tensor], reference: Reference | None, images: Images | None
    ) -> None:
        """`reference` is given on rank 0 alone; it starts over with the texts, ids [tokens] each."""
        self._ctx, self._reference, self._tokens = ctx, reference, sum(map(len, texts))
        self._wide = reference_dtype(ctx.compute)
        self.pieces = whole_pieces(ctx.model, texts, images)
        """The texts, with what is known beside the reference's stream."""
        self.out = self._stream(None if reference is None else reference.begin_all(texts, images))
        """The reference's stream so far."""
        self.steps: dict[str, Tensor] = {}
        """Step of the vision tower -> what it made, on the ranks of the first stage."""
        first = self.pieces[0].beside
        if first.tokens is not None:
            self._beside(first, None if reference is None else reference.pieces[0].beside)
            self._steps({} if reference is None else reference.looked)

    def _beside(self, mine: Beside, theirs: Beside | None) -> None:
        """Rank 0's places of the tokens and features of the images, in place of `mine`."""
        ctx, tokens = self._ctx, mine.tokens
        if mine.places is not None:
            places = None if theirs is None else theirs.places
            mine.places = ctx.comm.share(places, 0, mine.places.shape, torch.int64)
        if tokens is not None and ctx.model.sizes.get("deepstack"):
            deep = None if theirs is None else theirs.deep
            mine.deep = ctx.comm.share(deep, 0, deep_shape(ctx.model, tokens), self._wide)

    def _steps(self, made: dict[str, Tensor]) -> None:
        """Hand round what the tower's steps made; `made` is rank 0's, which is emptied."""
        ctx = self._ctx
        for name, shape in gather(ctx.comm, ctx.device, [[name, list(x.shape)] for name, x in made.items()])[0]:
            x = made.pop(name, None)
            shared = ctx.comm.share(x if x is None else x.to(self._wide), 0, shape, self._wide)
            if ctx.at.stage == 0:
                self.steps[name] = shared

    def next_layer(self, layer: Layer) -> Given:
        """Run the reference's layer and hand its results round."""
        ctx, record = self._ctx, None if self._reference is None else self._reference.next_layer()
        start, self.out = self.out, self._stream(None if record is None else record.out)
        if layer.words.get("index") == "previous":
            for number, piece in enumerate(self.pieces):
                tokens = len(piece.positions)
                shape = (tokens, min(tokens, picks_before(ctx.model, layer.index)))
                picked = None if record is None else record.pieces[number].beside.picked
                piece.beside.picked = ctx.comm.share(picked, 0, shape, torch.int64)
        made = {
            name: ctx.comm.share(
                None if record is None else record.made[name], 0,
                (self._tokens, ctx.size("experts" if name == "router" else "hidden")), self._wide,
            )
            for name in operators(layer, self.pieces[0].beside.deep)
        }  # fmt: skip
        return Given(start, self.out, made, self._routes(record) if layer.words["ffn"] == "moe" else None)

    def _routes(self, record: Record | None) -> Routes:
        ctx, found = self._ctx, None if record is None else record.routing
        shape = (self._tokens, ctx.size("topk"))
        ids = ctx.comm.share(None if found is None else found.indices, 0, shape, torch.int64)
        mine = None if found is None else relative_margin(found).to(ctx.device, torch.float32)
        return Routes(ids, ctx.comm.share(mine, 0, (self._tokens,), torch.float32))

    def _stream(self, x: Tensor | None) -> Tensor:
        """Rank 0's stream on all ranks. How wide it is the reference says: a rank's own model may be wrong there."""
        comm, hidden = self._ctx.comm, self._ctx.size("hidden")
        if stream.vectors(self._ctx.model, 0) is None:
            return comm.share(x, 0, (self._tokens, hidden), self._wide)
        mine = None if x is None else torch.tensor([x.shape[1]], device=x.device)
        width = int(comm.share(mine, 0, (1,), torch.int64))
        return comm.share(x, 0, (self._tokens, width, hidden), self._wide)
