"""What the reference tells beside the run: what a change of precision does or would do, and what transformers says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from runtime.checking.checks import Check
from runtime.checking.outside import judge_reference
from runtime.checking.precision import judge_precision
from runtime.checking.reference import Reference
from runtime.checking.sensitivity import Cost, sensitivity
from runtime.request import Request
from runtime.session import Outcome
from shard_plans.documents.conversions import Tally
from shard_plans.documents.manifest import read_shard_manifest


@dataclass(frozen=True, slots=True)
class Judged:
    """As far as it was asked for."""

    precision: Check | None = None
    """What the plan's change of precision does, where it changes something."""
    library: Check | None = None
    """How the reference compares with the transformers library's model."""
    costs: tuple[Cost, ...] = ()
    """What each group of weights costs in 8 bits."""


def judge(
    request: Request, reference: Reference | None, own: Reference | None, outcome: Outcome, texts: Sequence[Tensor]
) -> Judged:
    """`own` is the reference with the checkpoint's own weights, which may be the `reference`; rank 0 has them."""
    if reference is None or own is None:
        return Judged()
    options, library, costs = request.options, None, list[Cost]()
    precision = None if own is reference else _precision(request, reference, own, outcome, texts)
    if options.transformers:
        with options.progress("asking transformers", "layers") as advance:
            library = judge_reference(own, texts, outcome.logits, advance)
    if options.sensitivity:
        with options.progress("rounding groups of weights", "layers") as advance:
            costs = sensitivity(own, texts, advance)
    return Judged(precision, library, tuple(costs))


def _precision(
    request: Request, reference: Reference, own: Reference, outcome: Outcome, texts: Sequence[Tensor]
) -> Check | None:
    """What the plan's change of precision does; None where it cost nothing, or images take part."""
    opened, tally = request.opened, Tally()
    tally.take(read_shard_manifest(opened.out, file.name, opened.root) for file in opened.root.files)
    lossy = [tensor for tensor in tally.tensors() if tensor.largest > 0]
    if not lossy or request.images is not None:
        return None
    with request.options.progress("judging precision", "layers"):
        return judge_precision(own, reference, texts, outcome.logits, lossy, opened.plan.weights)
