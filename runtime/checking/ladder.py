"""The verification ladder on one rank: each layer alone with the reference's own input, and end to end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from runtime.blocks import forward, stream
from runtime.blocks.forward import Routing
from runtime.blocks.images import Images
from runtime.blocks.piece import Piece
from runtime.blocks.probe import NOBODY, Probe
from runtime.blocks.weights import LayerWeights
from runtime.checking.checks import Measure, exact, limits, worst
from runtime.checking.compare import NOISE, cosine, layer_error, relative, relative_margin
from runtime.checking.decode import decode
from runtime.checking.edges import handed_over, stream_error
from runtime.checking.figures import LayerFigures
from runtime.checking.handed import Given, Handed
from runtime.checking.probes import OPERATORS, Compared, Replay, operators
from runtime.checking.reference import Reference
from runtime.checking.tower import WRONG, deep_measure, passes, placed_measure, places_measure, tower_measures
from runtime.passes import RankRun
from shard_plans.console import Advance
from shard_plans.families.model import Layer


class Ladder:
    """Watches a pass of one rank. Rank 0 runs the reference and hands each layer's result to all.

    Without a reference it only notes how tokens are routed, and near-ties, after which replicas may differ.
    """

    def __init__(
        self,
        run: RankRun,
        texts: Sequence[Tensor],
        compare: bool,
        reference: Reference | None,
        images: Images | None = None,
        advance: Advance | None = None,
        pieces: Sequence[Piece] = (),
    ) -> None:
        """`texts`: ids [tokens] of each, whose rows lie one behind the other. `compare`: there is a reference, which is
        given on rank 0 alone. `advance` is told of every layer. `pieces`: the texts as this rank runs them.
        """
        self._advance = advance
        self.run, self.ctx, self._sizes = run, run.ctx, [len(ids) for ids in texts]
        self._exact, self._noise = exact(run.ctx.compute), NOISE[run.ctx.compute]
        self._limit = limits(run.ctx.compute)[0]
        self._handed = Handed(run.ctx, texts, reference, images) if compare else None
        self._given: Given | None = None
        self._replay: Replay | None = None
        self.untied = sum(self._sizes)
        """Rows before the first whose route in this rank's own pass was a near-tie."""
        self.wrong = self.routed = 0
        """Tokens and layers routed elsewhere than the reference, fed with its input (in low precision by near-ties
        too), and all of them.
        """
        self.figures: list[LayerFigures] = []
        """Of every layer that this rank ran."""
        self._worst: dict[str, Measure] = {}

        if self._handed is not None and pieces:
            self._vision(places_measure(self.ctx, pieces[0].beside, self._handed.pieces[0].beside))

    @property
    def measures(self) -> list[Measure]:
        """The worst of each kind."""
        return list(self._worst.values())

    def looked(self, weights: LayerWeights, images: Images, deep: Tensor | None) -> None:
        """Look again, each step of the tower with what the reference's step before it made."""
        if self._handed is None:
            return
        for measure in tower_measures(self.ctx, weights, images, self._handed.steps):
            self._vision(measure)
        self._handed.steps.clear()
        theirs = self._handed.pieces[0].beside.deep
        if theirs is not None:
            self._vision(deep_measure(self.ctx, f"deep features, rank {self.ctx.at.rank}", deep, theirs))

    def placed(self, tokens: Tensor, x: Tensor) -> None:
        """Compare what the images became."""
        if self._handed is not None:
            self._vision(placed_measure(self.ctx, tokens, x, self._handed.out))

    def before(self, layer: Layer) -> Probe:
        """Learn what the reference makes of the layer; near-ties of the pass will take its routes."""
        if self._handed is None:
            return NOBODY
        self._given = given = self._handed.next_layer(layer)
        stage = self.run.stage_of(layer.index)
        if stage and layer.index == self.run.stages[stage][0]:
            came = handed_over(self.run, stage, given.start, self._handed.pieces)
            self._entered(f"handed to stage {stage}", None if came is None else came[0])
            theirs = self._handed.pieces[0].beside.deep
            if came is not None and came[1] is not None and theirs is not None:
                where = f"deep features handed to stage {stage}, rank {self.ctx.at.rank}"
                self._vision(deep_measure(self.ctx, where, came[1], theirs))
        self._replay = Replay(given.routes, self._noise, given.start) if self._exact and given.routes else None
        return self._replay or NOBODY

    def after(self, layer: Layer, weights: LayerWeights, start: Tensor, out: Tensor, routing: Routing | None) -> None:
        """Compare the layer's result end to end, then run it again on the reference's own input."""
        if self._advance is not None and self.ctx.at.dp == self.ctx.at.tp == 0:
            layers = [each.index for each in self.ctx.model.forward_layers]
            self._advance(layers.index(layer.index) + 1, len(layers))
        found = LayerFigures(layer.index, self.ctx.at.rank)
        self.figures.append(found)
        if routing is not None:
            margin = relative_margin(routing)
            near = margin <= self._noise
            self.untied = min([self.untied, *near.nonzero().flatten().tolist()])
            found.margin = float(margin.min())
            if self.ctx.at.dp == self.ctx.at.tp == 0:
                found.load = routing.indices.flatten().bincount(minlength=self.ctx.size("experts")).tolist()
        if self._given is not None and self._handed is not None:
            if layer.index == 0:
                self._entered("embedding", start)
            self._compare(layer, weights, out, found, self._given, self._handed.pieces)

    def _entered(self, what: str, x: Tensor | None) -> None:
        """Compare what came into the stage with the reference's stream there."""
        if x is None or self._given is None or self._handed is None:
            return
        found = stream_error(x, self._given.start, self._handed.pieces[0].beside, self._exact)
        if found is not None:
            token = f", {self._token(found[1])}" if self._exact else ""
            self._note("layers", found[0], f"{what}, rank {self.ctx.at.rank}{token}")

    def _compare(
        self, layer: Layer, weights: LayerWeights, out: Tensor, found: LayerFigures, given: Given,
        pieces: Sequence[Piece],
    ) -> None:  # fmt: skip
        ctx, where = self.ctx, f"layer {layer.index}, rank {self.ctx.at.rank}"
        probe = Compared(given.made, given.routes, self._noise, self._exact)
        begin = given.start.to(ctx.compute)
        alone, _ = forward.run_pieces(ctx, layer, weights, begin, pieces, probe)
        longest = self._sizes.index(max(self._sizes))
        first = sum(self._sizes[:longest])
        rows = slice(first, first + self._sizes[longest])
        routes = None if given.routes is None else given.routes.rows(rows.start, rows.stop)
        stepped = decode(ctx, layer, weights, begin[rows], pieces[longest].beside, routes, self._noise)
        self._routing(where, found, probe, given)
        self._operators(where, layer, found, probe)
        for check, x in (("layers", alone), ("hidden", out), ("decode", stepped)):
            if x is None:
                continue
            if x.shape[1:] != given.out.shape[1:]:
                words = f"{where}: {x.shape[1]} vectors a token, the reference has {given.out.shape[1]}"
                self._note(check, math.inf if self._exact else -1.0, words)
                continue
            stop = rows.stop if check == "decode" else len(given.out)
            here = slice(stop - len(x), stop)
            theirs = given.out[here]
            if not self._exact:
                value, words = cosine(x, theirs), where
            elif check == "hidden":
                value, words = relative(x, theirs), where
            else:
                base = stream.carry(ctx.model, layer, given.start)[here]
                value, row = layer_error(base, x, theirs)
                words = f"{where}, {self._token(here.start + row)}"
                if probe.own is not None and given.routes is not None:
                    words += f" (experts {', '.join(map(str, given.routes.ids[here.start + row].tolist()))})"
            setattr(found, "alone" if check == "layers" else check, value)
            self._note(check, value, words)

    def _operators(self, where: str, layer: Layer, found: LayerFigures, probe: Compared) -> None:
        """The first operator that fails, or the worst of those that pass."""
        wanted = operators(layer, None if self._handed is None else self._handed.pieces[0].beside.deep)
        lost = WRONG if self._exact else -WRONG  # what wasn't run; scores of routers have no cosine
        probe.found.update({n: (lost, 0) for n in wanted if n not in probe.found and (self._exact or n != "router")})
        found.operators = {name: value for name, (value, _) in probe.found.items()}
        seen = [name for name in wanted if name in probe.found]
        failed = [name for name in seen if self._exact and not probe.found[name][0] <= self._limit]
        first = failed[0] if failed else poorest({name: probe.found[name][0] for name in seen}, self._exact)
        value, token = probe.found[first]
        words = f"{where}, {first}" + (f", {self._token(token)}" if self._exact else "")
        order = layer.index * len(OPERATORS) + OPERATORS.index(first)
        known = self._worst.get("operators")
        if known is None or not self._exact or known.value <= self._limit:
            self._note("operators", value, words, order)

    def _routing(self, where: str, found: LayerFigures, probe: Compared, given: Given) -> None:
        if probe.routed_as is None or probe.own is None or given.routes is None:
            return
        routed, ids = probe.routed_as, given.routes.ids
        found.margin, found.wrong, found.ties = routed.margin, list(routed.wrong), list(routed.ties)
        if self._replay is not None and self._replay.routed_as is not None:
            found.replayed = list(self._replay.routed_as.ties)
        differ = len(routed.wrong) + (0 if self._exact else len(routed.ties))
        self.wrong, self.routed = self.wrong + differ, self.routed + routed.tokens
        if not self._exact:
            self._note("routing", 1 - differ / max(1, routed.tokens), where)
        elif routed.wrong:
            token = routed.wrong[0]
            words = f"{where}, {self._token(token)}: experts {sorted(probe.own[token].tolist())}, the reference chose "
            words += f"{sorted(ids[token].tolist())} by a margin of {float(given.routes.margin[token]):.1e}"
            self._note("routing", float(len(routed.wrong)), words)
        else:
            self._note("routing", 0.0, f"{where}, smallest margin {routed.margin:.1e}")

    def _token(self, row: int) -> str:
        """A row in words: the token, and its text where there are several."""
        number = 0
        while row >= self._sizes[number]:
            row, number = row - self._sizes[number], number + 1
        return f"token {row}" if len(self._sizes) == 1 else f"prompt {number}, token {row}"

    def _vision(self, measure: Measure | None) -> None:
        """Keep the first that fails of the images' path, or the worst of those that pass."""
        known = self._worst.get("vision")
        if measure is not None and (known is None or passes(known, self.ctx.compute)):
            self._note("vision", measure.value, measure.where, measure.order)

    def _note(self, check: str, value: float, where: str, order: int = 0) -> None:
        new, known = Measure(check, value, where, order), self._worst.get(check)
        self._worst[check] = new if known is None else worst([known, new], self._exact) or new


def poorest(values: Mapping[str, float], high: bool) -> str:
    """The name of the worst value, as `worst` has it: one that isn't a number is worse than all."""
    found = worst((Measure(name, value, "") for name, value in values.items()), high)
    assert found is not None
    return found.check
