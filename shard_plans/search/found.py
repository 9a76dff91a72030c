"""What a search found: the plan, the next best, and why the others were rejected."""

from __future__ import annotations

from dataclasses import dataclass, field

from shard_plans.cost.prediction import Prediction
from shard_plans.documents.plan import Plan
from shard_plans.layouts.loaders import Loader
from shard_plans.placement.grid import Grid
from shard_plans.search.candidate import Candidate
from shard_plans.search.dealt import Dealt
from shard_plans.search.remedies import Remedy


@dataclass(frozen=True, slots=True)
class Alternative:
    """A plan that fits too, and what it trades against the best."""

    candidate: Candidate
    room: int
    """Bytes that its fullest rank has left."""
    trades: str
    """What is better and what is worse than in the best plan."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """Grids of one tp and pp that weren't taken."""

    tp: int
    pp: int
    """0: any."""
    grids: int
    """How many were judged; 0 where none was, for the reason given."""
    reason: str
    """memory, speed, cut or nodes."""
    detail: str
    """The reason as a sentence, with its numbers."""


@dataclass(frozen=True, slots=True)
class Found:
    """The outcome of a search."""

    plan: Plan
    goal: str
    prediction: Prediction | None = None
    alternatives: tuple[Alternative, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    assumptions: tuple[str, ...] = ()
    """What the prediction takes for granted, as sentences."""
    remedies: tuple[Remedy, ...] = field(default=())
    """What would fit, where the plan doesn't."""
    grids: int = 1
    """Legal grids that were looked at."""
    dealt: Dealt | None = None
    """How experts were dealt by a load."""
    loaders: tuple[Loader, ...] = ()
    """What can load the plan's shards."""


def trades(best: Candidate, other: Candidate) -> str:
    """What `other` trades against `best`: room, tokens a second, the first token, communication."""
    words = []
    if best.prediction is not None and other.prediction is not None:
        for name, unit in (("decode_tokens", "tokens/s"), ("prefill_tokens", "prefill tokens/s")):
            change = getattr(other.prediction, name) / getattr(best.prediction, name) - 1
            words.append(f"{change:+.1%} {unit}")
        change = other.prediction.first_token / best.prediction.first_token - 1
        words.append(f"{change:+.1%} time to first token")
        words.append(f"communication {other.prediction.decode_links:.0%} of a step")
    words.insert(0, f"{(best.need - other.need) / 1e9:+.1f} GB room")
    return ", ".join(words)


def named(grid: Grid) -> str:
    """`tp 8  pp 3  dp 1  ep 8  etp 1`."""
    return f"tp {grid.tp}  pp {grid.pp}  dp {grid.dp}  ep {grid.ep}  etp {grid.etp}"
