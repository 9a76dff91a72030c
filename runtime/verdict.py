"""From what the ranks found to the checks of a report, and the sentences about what wasn't checked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from converter.check import CheckResult
from runtime.checking.cached import cache_checks
from runtime.checking.checks import (
    AGREEMENT,
    COSINE,
    DIVERGENCE,
    LIKELIHOOD,
    LIMIT,
    Check,
    Measure,
    exact,
    limits,
    make_check,
)
from runtime.judged import Judged
from runtime.opened import Opened
from runtime.session import Outcome
from shard_plans.errors import ManifestError, NotFinite, ReshardError

SMOKE = "a smoke test: real bugs can pass it"


@dataclass(frozen=True, slots=True, eq=False)
class Ran:
    """A run, as far as it came."""

    opened: Opened
    compute: torch.dtype
    compared: bool
    """There was a reference."""
    hashed: bool
    at_rest: CheckResult | None
    """The deep check against the reference's checkpoint."""
    outcome: Outcome | None
    fault: ReshardError | None
    """Why the shards couldn't be loaded or run."""
    figures: dict[str, Any]
    reports: bool
    """This process knows about the fault."""
    judged: Judged
    """What the reference told beside the run."""
    lossless_cache: bool = True
    """The cache keeps what is computed."""


def checks_of(ran: Ran) -> tuple[Check, ...]:
    """The checks in the order of the ladder."""
    found: list[Check | None] = [*_loading(ran), _bytes(ran)]
    if ran.outcome is not None:
        found += _exact(ran.outcome, *limits(ran.compute)) if exact(ran.compute) else _smoke(ran.outcome)
        strict = exact(ran.compute) and ran.lossless_cache
        if ran.outcome.cached is not None:
            found += cache_checks(ran.outcome.cached, limits(ran.compute)[0] if strict else None)
        found += [ran.judged.precision, ran.judged.library]
    return tuple(check for check in found if check is not None)


def _loading(ran: Ran) -> list[Check | None]:
    if ran.fault is not None:
        if isinstance(ran.fault, NotFinite):
            return [Check("finite", False, None, 0.0, str(ran.fault), "the forward pass stopped there")]
        if not isinstance(ran.fault, ManifestError):
            return [Check("layers", False, None, LIMIT, str(ran.fault), "the forward pass couldn't be run")]
        return [Check("hashes", False, 1.0, 0.0, str(ran.fault), "loading stopped at the first difference")]
    if not ran.hashed:
        return [None]
    words = f"{len(ran.opened.root.files)} files, {ran.figures.get('bytes_read', 0)} bytes as they were loaded"
    return [Check("hashes", True, 0.0, 0.0, words)]


def _bytes(ran: Ran) -> Check | None:
    if ran.at_rest is None:
        return None
    failures = ran.at_rest.failures
    if not failures:
        return Check("bytes", ran.at_rest.passed, 0.0, 0.0, f"{ran.at_rest.tensors} tensors put together again")
    shards = {file.name for file in ran.opened.root.files}
    first = next((failure for failure in failures if failure.file in shards), failures[0])
    where = f"{first.file}" + (f", tensor {first.tensor}" if first.tensor else "") + f": {first.reason}"
    return Check("bytes", False, float(len(failures)), 0.0, where, f"{len(failures)} differences, the first is named")


def _exact(outcome: Outcome, limit: float, aim: float) -> list[Check | None]:
    measures = outcome.measures

    def relative(name: str, what: str) -> Check | None:
        check = make_check(name, measures, limit)
        if check is None:
            return None
        reached = "reached" if check.worst is not None and check.worst <= aim else "missed"
        return make_check(name, measures, limit, f"{what}; aimed at {aim:g}: {reached}")

    return [
        relative("vision", "relative error of one row of a step of the tower, or of one of the images' tokens"),
        relative("layers", "relative error of a layer's contribution to one token, fed with the reference's input"),
        relative("operators", "relative error of what one operator of such a layer made of one token"),
        make_check("routing", measures, 0.0, _routes(outcome)),
        relative("decode", "relative error of the last tokens' contributions, a token at a time through the cache"),
        relative("replicas", f"relative error of one token's logits, over {outcome.agreed} tokens"),
        *_ends(
            outcome, relative("hidden", "relative error end to end"), relative("logits", "relative error end to end")
        ),
    ]


def _ends(outcome: Outcome, hidden: Check | None, logits: Check | None) -> tuple[Check | None, Check | None]:
    """Both checks end to end, with what a failure says: the first layer that parts, or, where none does, the head."""
    if hidden is None or logits is None:
        return hidden, logits
    apart = [x.layer for x in outcome.layers if x.hidden is not None and not x.hidden <= hidden.limit]
    if apart:
        hidden = replace(hidden, where=f"{hidden.where}, first beyond the limit behind layer {apart[0]}")
    elif not logits.passed:
        logits = replace(logits, where=f"{logits.where}: the last norm or the head, what comes into them is right")
    return hidden, logits


def _routes(outcome: Outcome) -> str:
    """How many routes differ, how close the closest was, and which were turned by rounding."""
    margins = [layer.margin for layer in outcome.layers if layer.margin is not None]
    words = f"{outcome.wrong} of {outcome.routed} routes differ"
    if margins:
        words += f"; smallest margin {min(margins):.1e}"
    if ties := sum(len({*layer.ties, *layer.replayed}) for layer in outcome.layers):
        words += f"; {ties} near-tie{'s' if ties > 1 else ''} that rounding turned took the reference's route"
    return words


def _smoke(outcome: Outcome) -> list[Check | None]:
    measures: tuple[Measure, ...] = outcome.measures
    return [
        make_check(
            "vision",
            measures,
            COSINE,
            f"least cosine of a step of the tower, or of the images' tokens; {SMOKE}",
            high=False,
        ),
        make_check("layers", measures, COSINE, f"least cosine, fed with the reference's input; {SMOKE}", high=False),
        make_check("operators", measures, COSINE, f"least cosine of an operator in such a layer; {SMOKE}", high=False),
        _agreement(outcome),
        make_check("decode", measures, COSINE, f"least cosine of the last tokens, step by step; {SMOKE}", high=False),
        make_check("replicas", measures, COSINE, f"least cosine; {SMOKE}", high=False),
        make_check("hidden", measures, COSINE, f"least cosine end to end; {SMOKE}", high=False),
        make_check("logits", measures, COSINE, f"cosine end to end; {SMOKE}", high=False),
        make_check("likelihood", measures, LIKELIHOOD, f"relative difference of the log-likelihood; {SMOKE}"),
        make_check("divergence", measures, DIVERGENCE, f"Kullback-Leibler divergence, nats a token; {SMOKE}"),
    ]


def _agreement(outcome: Outcome) -> Check | None:
    """Routes of all layers together: a single one of a few tokens weighs too much in one layer."""
    worst = make_check("routing", outcome.measures, AGREEMENT, high=False)
    if worst is None:
        return None
    alike = 1 - outcome.wrong / outcome.routed
    ties = sum(len(layer.ties) for layer in outcome.layers)
    near = f", {ties} near-ties that differ among them" if ties else ""
    note = f"part of {outcome.routed} routes that are alike{near}; {SMOKE}"
    return replace(worst, passed=alike >= AGREEMENT, worst=alike, where=f"most differ in {worst.where}", note=note)
