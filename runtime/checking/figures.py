"""What was measured of each layer: figures of single ranks, and the layer's, which are the worst of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from runtime.checking.checks import Measure
from shard_plans.families.model import Layer


@dataclass(slots=True)
class LayerFigures:
    """One layer on one rank, or the worst of all ranks. Relative errors; in low precision cosines."""

    layer: int
    rank: int
    """The rank whose `alone` is the worst."""
    alone: float | None = None
    """Fed with the reference's own input."""
    hidden: float | None = None
    """The stream behind it, end to end."""
    decode: float | None = None
    """The last tokens step by step, against the reference's prefill; fed with its input."""
    operators: dict[str, float] = field(default_factory=dict)
    """What each operator made while the layer was fed with the reference's input."""
    margin: float | None = None
    """The router's smallest, as a part of the token's largest score."""
    wrong: list[int] = field(default_factory=list)
    """Tokens that rounding can't have sent elsewhere than the reference."""
    ties: list[int] = field(default_factory=list)
    """Tokens that a near-tie sent elsewhere, fed with the reference's input; ..."""
    replayed: list[int] = field(default_factory=list)
    """... and end to end. Both then took the reference's route."""
    load: list[int] | None = None
    """How many choices of replica 0's tokens each expert got, in the order of their ids."""

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it: what isn't a finite number is null."""
        found = asdict(self)
        for name, value in found.items():
            if isinstance(value, float):
                found[name] = _finite(value)
        return {**found, "operators": {name: _finite(value) for name, value in self.operators.items()}}


def merge(figures: Iterable[LayerFigures], exact: bool) -> list[LayerFigures]:
    """One for each layer, in order: the worst of all its ranks."""
    merged: dict[int, LayerFigures] = {}
    for one in figures:
        known = merged.setdefault(one.layer, one)
        if known is one:
            continue
        if _worse(known.alone, one.alone, exact) is not known.alone and not _is_nan(known.alone):
            known.rank = one.rank
        for name in ("alone", "hidden", "decode"):
            setattr(known, name, _worse(getattr(one, name), getattr(known, name), exact))
        for name, value in one.operators.items():
            known.operators[name] = _worse(value, known.operators.get(name), exact) or 0.0
        known.margin = _worse(one.margin, known.margin, False)
        for name in ("wrong", "ties", "replayed"):
            setattr(known, name, sorted({*getattr(known, name), *getattr(one, name)}))
        known.load = known.load or one.load
    return [merged[layer] for layer in sorted(merged)]


def lacking(layers: Sequence[Layer], figures: Iterable[LayerFigures], ranks: int) -> Iterator[Measure]:
    """A failure for each layer that wasn't run, and so compared, by all `ranks` of its stage."""
    seen = Counter(one.layer for one in figures)
    for layer in layers:
        if seen[layer.index] < ranks:
            where = f"layer {layer.index}: run by {seen[layer.index]} of the {ranks} ranks of its stage"
            yield Measure("layers", math.inf, where)


def _worse(one: float | None, other: float | None, high: bool) -> float | None:
    """The worse of two: the higher, or the lower; what isn't a number is worse than all."""
    if one is None or other is None:
        return one if other is None else other
    if _is_nan(one) or _is_nan(other):
        return math.nan
    return max(one, other) if high else min(one, other)


def _is_nan(value: float | None) -> bool:
    return value is not None and math.isnan(value)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
