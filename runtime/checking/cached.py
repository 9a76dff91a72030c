"""The answers through the cache against one pass without it over the same tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from runtime.blocks.forward import Routing
from runtime.blocks.images import Images
from runtime.blocks.probe import NOBODY, Probe
from runtime.blocks.weights import LayerWeights
from runtime.checking.checks import AGREEMENT, COSINE, LIKELIHOOD, Check, Measure, exact, gather, make_check, worst
from runtime.checking.compare import NOISE, cosine, relative_margin, row_errors
from runtime.checking.probes import Replay, Routes
from runtime.generate import Answer, Generation
from runtime.passes import batch_pass, next_piece
from shard_plans.families.model import Layer

LEAST = 1.0
"""Least mean log-likelihood, in nats, that a difference is measured against: greedy tokens may be all but certain."""
SLACK = 10.0
"""How many times rounding's own noise may part the scores of two passes over the same tokens."""


class RouteLog:
    """Watches passes, and keeps where each layer sent their rows."""

    def __init__(self) -> None:
        """Nothing was seen yet."""
        self._seen: dict[int, list[Routes]] = {}

    def looked(self, weights: LayerWeights, images: Images, deep: Tensor | None) -> None:
        """Nothing to do."""

    def placed(self, tokens: Tensor, x: Tensor) -> None:
        """Nothing to do."""

    def before(self, layer: Layer) -> Probe:
        """Nobody looks on."""
        return NOBODY

    def after(self, layer: Layer, weights: LayerWeights, start: Tensor, out: Tensor, routing: Routing | None) -> None:
        """Keep the routes."""
        if routing is not None:
            self._seen.setdefault(layer.index, []).append(Routes(routing.indices, relative_margin(routing)))

    def routes(self, rows: Tensor) -> dict[int, Routes]:
        """Layer -> the routes of all `rows` that ran, in this order."""
        return {
            layer: Routes(torch.cat([each.ids for each in seen])[rows], torch.cat([each.margin for each in seen])[rows])
            for layer, seen in self._seen.items()
        }


class RouteReplay:
    """Watches a pass over the same rows: near-ties take the routes given, others that differ are counted."""

    def __init__(self, routes: Mapping[int, Routes], noise: float) -> None:
        """`noise` as of Replay."""
        self._routes, self._noise, self._now = routes, noise, Replay(None, noise)
        self.wrong = self.routed = 0
        """Rows of all layers that differ, and all of them."""

    def looked(self, weights: LayerWeights, images: Images, deep: Tensor | None) -> None:
        """Nothing to do."""

    def placed(self, tokens: Tensor, x: Tensor) -> None:
        """Nothing to do."""

    def before(self, layer: Layer) -> Probe:
        """What replays the layer's routes."""
        self._now = Replay(self._routes.get(layer.index), self._noise)
        return self._now

    def after(self, layer: Layer, weights: LayerWeights, start: Tensor, out: Tensor, routing: Routing | None) -> None:
        """Count."""
        if self._now.routed_as is not None:
            self.wrong += len(self._now.routed_as.wrong)
            self.routed += self._now.routed_as.tokens


@dataclass(frozen=True, slots=True)
class Compared:
    """What came of it."""

    error: float
    """The worst relative error of one token's logits; nan where one isn't finite."""
    cosine: float
    """Of all logits."""
    likelihood: float
    """Relative difference of the mean log-likelihood of the tokens that come next."""
    where: str
    tokens: int
    """Whose logits were compared."""
    wrong: int = 0
    routed: int = 0
    """Routes that differ on any rank, and all of them."""


def compare_cached(generation: Generation, log: RouteLog, lossless: bool) -> Compared:
    """Run all answers again without a cache, and compare the logits of the last token of each of their passes.

    Each replica compares its own; the worst of them counts. `log` watched the passes of `generation`. Where the cache
    keeps what is computed (`lossless`), near-ties of routers are replayed. Every rank calls it, and gets the same.
    """
    run, answers = generation.run, generation.answers
    device, pieces, rows, firsts = run.ctx.device, [], list[int](), [0]
    for answer in answers:
        ids = answer.whole[: answer.seen]
        positions = torch.arange(len(ids), device=device)
        pieces.append(next_piece(run, ids, positions, None, generation.images, prompt=len(answer.ids)))
        rows += [firsts[-1] + position for position in answer.scores]
        firsts.append(firsts[-1] + len(ids))
    ran = torch.tensor([firsts[number] + position for number, position in generation.ran])
    noise = SLACK * NOISE[run.ctx.compute] if lossless and exact(run.ctx.compute) else -1.0
    replay = RouteReplay(log.routes(ran.argsort()), noise)
    scores = batch_pass(run, pieces, replay, generation.images, torch.tensor(rows, device=device))
    found = None
    if run.gives_scores and scores is not None:
        replica = f"replica {run.ctx.at.dp}, " if run.ctx.grid.dp > 1 else ""
        found = asdict(_compare(answers, scores, replica))
    every = gather(run.ctx.comm, device, (found, replay.wrong, replay.routed))
    wrong, routed = (sum(counts[number] for counts in every) for number in (1, 2))
    return replace(worst_of([Compared(**one) for one, _, _ in every if one is not None]), wrong=wrong, routed=routed)


def worst_of(replicas: Sequence[Compared]) -> Compared:
    """The worst of each number, and where the worst error is; what isn't a number is worse than all."""

    def pick(name: str, high: bool) -> Measure:
        found = worst((Measure(name, getattr(one, name), one.where) for one in replicas), high)
        assert found is not None
        return found

    error = pick("error", True)
    return replace(
        replicas[0], error=error.value, where=error.where, cosine=pick("cosine", False).value,
        likelihood=pick("likelihood", True).value,
    )  # fmt: skip


def _compare(answers: Sequence[Answer], theirs: Tensor, replica: str) -> Compared:
    known = [(number, position) for number, answer in enumerate(answers) for position in answer.scores]
    ours = torch.stack([score for answer in answers for score in answer.scores.values() if score is not None])
    wide, whole = ours.cpu().double(), theirs.cpu().double()
    errors = row_errors(wide, whole)
    row = int(errors.nan_to_num(math.inf).argmax())
    number, position = known[row]
    following = torch.stack([answers[number].whole[position + 1] for number, position in known]).cpu()
    mean, other = (float(x.log_softmax(-1).gather(1, following[:, None]).mean()) for x in (wide, whole))
    return Compared(
        float(errors[row]), cosine(ours, theirs), abs(mean - other) / max(abs(other), LEAST),
        f"{replica}prompt {number}, token {position}", len(known),
    )  # fmt: skip


def cache_checks(found: Compared, limit: float | None) -> list[Check]:
    """`limit` of a relative error, where cache and arithmetic keep what is computed; None: smoke tests."""
    over = f"of {found.tokens} tokens against a pass without the cache"
    if limit is not None:
        return [_check("cache", found.error, limit, found.where, f"relative error of the logits of one {over}")]
    smoke = f"{over}; a smoke test: real bugs can pass it"
    checks = [
        _check("cache", found.cosine, COSINE, found.where, f"cosine of the logits {smoke}", high=False),
        _check("cache_likelihood", found.likelihood, LIKELIHOOD, found.where, f"relative difference {smoke}"),
    ]
    if found.routed:
        alike = 1 - found.wrong / found.routed
        checks.append(
            _check("cache_routing", alike, AGREEMENT, found.where, f"part of {found.routed} routes alike", False)
        )
    return checks


def _check(name: str, value: float, limit: float, where: str, note: str, high: bool = True) -> Check:
    found = make_check(name, [Measure(name, value, where)], limit, note, high)
    assert found is not None
    return found
