"""What looks on while a layer runs: the reference's operators recorded, and those of the ranks compared with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from runtime.blocks.router import Routing
from runtime.checking.compare import Routed, compare_routing, cosine, operator_error, row_errors
from shard_plans.families.model import Layer

DRIFT, MOST = 10.0, 1e-3
"""How many times a token's error so far may move a score before a changed route is no longer put down to it, and the
largest error that explains any."""


OPERATORS = ("attn.norm", "attn", "ffn.norm", "router", "experts", "shared", "ffn", "deep")
"""What a probe sees of a layer, in the order of execution, but the stream that comes in."""


def operators(layer: Layer, deep: Tensor | None = None) -> tuple[str, ...]:
    """Those that a layer has; `deep` is what the first layers add of images [layers, ..]."""
    lacks = {"router", "experts", "shared"} if layer.words["ffn"] != "moe" else set()
    lacks |= {"shared"} if layer.words.get("shared") is None else set()
    lacks |= {"deep"} if deep is None or layer.index >= len(deep) else set()
    return tuple(name for name in OPERATORS if name not in lacks)


@dataclass(slots=True)
class Recorder:
    """Keeps what the operators of one layer made."""

    made: dict[str, Tensor] = field(default_factory=dict)

    def saw(self, operator: str, x: Tensor) -> None:
        """Keep it."""
        self.made[operator] = x

    def routed(self, routing: Routing) -> Tensor | None:
        """Leave the routes."""
        return None


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """Where the reference sent the tokens of one layer."""

    ids: Tensor
    """[T, k]."""
    margin: Tensor
    """[T], as a part of the token's largest score."""

    def rows(self, start: int, stop: int) -> Routes:
        """The same of some tokens."""
        return Routes(self.ids[start:stop], self.margin[start:stop])


class Replay:
    """Sends a token where the reference sent it, if rounding alone can have sent it elsewhere.

    `start` is the reference's stream into the layer: by how much a token's own differs from it, its scores may too.
    """

    def __init__(self, routes: Routes | None, noise: float, start: Tensor | None = None) -> None:
        """`noise`: the score difference that rounding explains, as a part of a token's largest score."""
        self._routes, self._start = routes, start
        self._noise = torch.tensor(noise, dtype=torch.float64)
        self.routed_as: Routed | None = None
        """How the tokens' own routes compare with the reference's."""
        self.own: Tensor | None = None
        """The tokens' own routes [T, k]."""

    def saw(self, operator: str, x: Tensor) -> None:
        """Note by how much the stream that comes in has drifted from the reference's."""
        if operator == "stream" and self._start is not None and x.shape == self._start.shape:
            drift = row_errors(x, self._start)
            self._noise = torch.maximum(self._noise, DRIFT * drift.clamp(max=MOST).nan_to_num(0.0))

    def routed(self, routing: Routing) -> Tensor | None:
        """The routes with those of near-ties replaced."""
        if self._routes is None:
            return None
        self.own = routing.indices
        self.routed_as = compare_routing(routing.indices, self._routes.ids, self._routes.margin, self._noise)
        ties = list(self.routed_as.ties)
        if not ties:
            return None
        instead = routing.indices.clone()
        instead[ties] = self._routes.ids[ties].to(instead.device)
        return instead


class Compared(Replay):
    """The same for a layer that is fed with the reference's input: what each operator makes is compared besides."""

    def __init__(self, made: Mapping[str, Tensor], routes: Routes | None, noise: float, exact: bool) -> None:
        """`made`: what the reference's operators made; `exact`: relative errors are measured, else cosines."""
        super().__init__(routes, noise)
        self._made, self._exact = made, exact
        self.found: dict[str, tuple[float, int]] = {}
        """Operator -> worst relative error of a token (or cosine of all), and the token."""

    def saw(self, operator: str, x: Tensor) -> None:
        """Compare it."""
        reference = self._made.get(operator)
        if reference is None:
            return
        if x.shape != reference.shape:
            self.found[operator] = (float("inf") if self._exact else -1.0, 0)
        elif self._exact:
            self.found[operator] = operator_error(x, reference)
        elif operator != "router":
            self.found[operator] = (cosine(x, reference), 0)
