"""The unsharded forward pass of the checkpoint, streamed a layer at a time: what the shards are measured against.

It reads stored names through the family table and unfused roles (stored.py), so it shares no byte-moving code with the
converter; it does share the table and the layer arithmetic with the sharded run.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from types import TracebackType

import torch
from torch import Tensor

from runtime.blocks import forward, towers
from runtime.blocks.forward import RankContext, Routing
from runtime.blocks.images import Images
from runtime.blocks.piece import Piece
from runtime.blocks.places import whole_pieces
from runtime.blocks.weights import LayerWeights
from runtime.checking.probes import Recorder
from runtime.checking.rebuilt import Rebuilt
from runtime.checking.stored import StoredWeights
from runtime.checking.tower import TowerRecorder
from shard_plans.errors import RuntimeFault
from shard_plans.families.binding import Binding
from shard_plans.families.model import Layer
from shard_plans.families.weights import group_of


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """What the reference computed for one layer."""

    layer: Layer
    start: Tensor
    """The stream into the layer [tokens, .., hidden]."""
    out: Tensor
    """The stream out of it."""
    routing: Routing | None
    """Where the tokens went, if the layer is a mixture of experts."""
    pieces: Sequence[Piece]
    """The texts, with what was known beside the stream before the layer ran."""
    made: Mapping[str, Tensor]
    """What each operator made of all tokens, by the words of Probe.saw."""


class Reference:
    """The reference's forward pass over some texts, taken layer by layer: one is run while the next is read."""

    def __init__(
        self, binding: Binding, compute: torch.dtype, device: torch.device, rebuilt: Rebuilt | None = None
    ) -> None:
        """Nothing is read yet; `compute` is float32 or float64. RuntimeFault where a block is missing.

        `rebuilt` reads the weights that the binding has in another precision than the checkpoint.
        """
        forward.check_model(binding.model)
        self.binding = binding
        self.context: RankContext = forward.single_rank(binding.model, compute, device)
        self._weights = StoredWeights(binding, rebuilt)
        self._pool = ThreadPoolExecutor(1, "reference")
        self._coming: tuple[int | str, Future[LayerWeights]] | None = None
        self._order: dict[int | str, int | str] = dict(
            pairwise(["vision", "first", *(layer.index for layer in binding.model.forward_layers), "last"])
        )
        self.seconds_waited = 0.0
        """What was spent waiting for weights."""
        self.groups = {
            parameter.role: group
            for parameter in binding.parameters
            if (group := group_of(parameter.role, bool(parameter.quant))) is not None
        }
        """Role -> its group of weights (docs/precision.md), of those that may change."""
        self._left = deque(binding.model.forward_layers)
        self._x: Tensor | None = None
        self.pieces: Sequence[Piece] = ()
        """The texts, with what is known beside the stream reached so far."""

        self.looked: dict[str, Tensor] = {}
        """Step of the vision tower -> what it made; whoever hands it on may empty it."""

    @property
    def largest(self) -> tuple[int, int]:
        """Bytes of the largest section as stored; numbers of the largest matrix."""
        return self._weights.largest, self._weights.largest_matrix

    @property
    def bytes_read(self) -> int:
        """Bytes of the checkpoint read so far."""
        return self._weights.bytes_read

    def begin(self, ids: Tensor, images: Images | None = None) -> Tensor:
        """Start over with one text, ids [tokens], and the images in it; returns the stream into the first layer."""
        return self.begin_all([ids], images)

    def begin_all(self, texts: Sequence[Tensor], images: Images | None = None) -> Tensor:
        """The same with several, whose rows lie one behind the other; `images` are those of the first."""
        device = self.context.device
        self.looked.clear()
        self._left = deque(self.context.model.forward_layers)
        self.pieces = whole_pieces(self.context.model, [ids.to(device) for ids in texts], images)
        ids = torch.cat([ids.to(device) for ids in texts])
        with torch.no_grad():
            tower = {} if images is None else self._section("vision")
            looker, beside = TowerRecorder(self.looked), self.pieces[0].beside
            seen = None if images is None else towers.see(self.context, tower, images, ids, beside, looker)
            self._x = forward.embed(self.context, self._section("first"), ids, seen)
        return self._x

    def next_layer(self) -> Record:
        """Run the next layer."""
        start = self._started()
        if not self._left:
            raise RuntimeFault("the reference was asked for a layer behind its last one")
        layer = self._left.popleft()
        before, recorder = [replace(piece, beside=replace(piece.beside)) for piece in self.pieces], Recorder()
        with torch.no_grad():
            weights = self.weights(layer.index)
            out, routing = forward.run_pieces(self.context, layer, weights, start, self.pieces, recorder)
        self._x = out
        return Record(layer, start, out, routing, before, recorder.made)

    def weights(self, layer: int) -> LayerWeights:
        """Of one layer, on the device."""
        return self._section(layer)

    def logits(self) -> Tensor:
        """[rows, vocabulary]; layers that weren't asked for are run first."""
        while self._left:
            self.next_layer()
        x = self._started()
        with torch.no_grad():
            return forward.logits(self.context, self.outside("last"), x)

    def outside(self, place: str) -> LayerWeights:
        """What is `first` or `last`, on the device; a tied embedding is both."""
        weights = self._section(place)
        if place == "last" and "head" not in weights:
            return {**weights, "embed": self._section("first")["embed"]}
        return weights

    def _section(self, place: int | str) -> LayerWeights:
        """Parameters of a layer, or of `first`, `vision` or `last`; what comes behind it is read from now on."""
        began = time.monotonic()
        coming, self._coming = self._coming, None
        job = coming[1] if coming is not None and coming[0] == place else self._begin(place)
        del coming
        weights = job.result()
        self.seconds_waited += time.monotonic() - began
        following = self._order.get(place)
        if following is not None:
            self._coming = following, self._begin(following)
        return weights

    def _begin(self, place: int | str) -> Future[LayerWeights]:
        return self._pool.submit(self._weights.section, place, self.context.device)

    def _started(self) -> Tensor:
        if self._x is None:
            raise RuntimeFault("the reference has no input yet; call begin first")
        return self._x

    def close(self) -> None:
        """Close the checkpoint's files."""
        self._pool.shutdown(cancel_futures=True)
        self._coming = None
        self._weights.close()

    def __enter__(self) -> Reference:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
