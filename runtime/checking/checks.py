"""What a verification found: measures of single ranks, and the checks that they add up to."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from runtime.comm.comm import Comm

LIMIT, AIM = 1e-3, 1e-5
"""Relative errors in float32: what passes, and what a healthy model stays under."""
FINE_LIMIT, FINE_AIM = 1e-9, 1e-12
"""The same in float64, which shows what float32's rounding hides: another eps of a norm, say."""
COSINE, AGREEMENT, LIKELIHOOD, DIVERGENCE = 0.99, 0.95, 0.05, 0.1
"""Smoke tests in low precision: least cosine, least part of tokens routed alike, largest relative difference of the
log-likelihood, largest Kullback-Leibler divergence in nats a token.
"""


def exact(compute: torch.dtype) -> bool:
    """Whether errors in this type are small enough for the strict limits."""
    return compute in (torch.float32, torch.float64)


def limits(compute: torch.dtype) -> tuple[float, float]:
    """What passes in this type, and what is aimed at."""
    return (FINE_LIMIT, FINE_AIM) if compute == torch.float64 else (LIMIT, AIM)


@dataclass(frozen=True, slots=True)
class Measure:
    """One number that one rank measured somewhere."""

    check: str
    value: float
    where: str
    order: int = 0
    """Of those that don't pass the lowest is named: what comes later may follow from it."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check of the ladder, over all ranks."""

    name: str
    passed: bool
    worst: float | None
    """The worst value measured; None where it isn't a number."""
    limit: float
    """The most that passes, or the least (see `bound`)."""
    where: str
    """Where the worst was found: file, tensor, layer, rank, token."""
    note: str = ""
    """What the numbers mean, in words."""
    bound: str = "most"
    """Whether the limit is the most or the least that passes."""

    def as_dict(self) -> dict[str, Any]:
        """The check as JSON has it."""
        return asdict(self)


def worst(measures: Iterable[Measure], high: bool = True) -> Measure | None:
    """The worst of the measures: the highest (or the lowest); one that isn't a number is worse than all."""
    found: Measure | None = None
    for measure in measures:
        if math.isnan(measure.value):
            return measure
        if found is None or (measure.value > found.value if high else measure.value < found.value):
            found = measure
    return found


def make_check(name: str, measures: Iterable[Measure], limit: float, note: str = "", high: bool = True) -> Check | None:
    """The check `name` from its measures; None where nothing was measured. nan never passes."""
    own = [measure for measure in measures if measure.check == name]
    wrong = [m for m in own if not (m.value <= limit if high else m.value >= limit)]
    first = min((measure.order for measure in wrong), default=0)
    found = worst([measure for measure in wrong if measure.order == first] or own, high)
    if found is None:
        return None
    number = None if not math.isfinite(found.value) else found.value
    where = found.where if number is not None else f"{found.where}: {found.value}, not a finite number"
    return Check(name, not wrong, number, limit, where, note, "most" if high else "least")


def gather(comm: Comm, device: torch.device, value: Any) -> list[Any]:
    """Every rank's JSON value, in rank order, on all ranks."""
    raw = json.dumps(value).encode()
    mine = torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(device)
    parts = comm.all_gather(mine, tuple(range(comm.world)))
    return [json.loads(bytes(part.cpu().numpy())) for part in parts]
