"""When each rank asked for the weights of a section, had them, and was done with them, in its first pass."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Span:
    """One section of the pass on one rank; seconds since the rank began."""

    rank: int
    section: int
    """A layer's number, or FIRST or LAST (runtime/loading/sections.py)."""
    asked: float
    """It wanted the weights, ..."""
    got: float
    """... had them, ..."""
    ran: float
    """... had computed what it had to, ..."""
    done: float
    """... and had compared it."""
    resident: int
    """Bytes of weights in the memory of its process when it had them."""

    def as_list(self) -> list[float]:
        """As JSON has it."""
        times = (self.asked, self.got, self.ran, self.done)
        return [self.rank, self.section, *(round(seconds, 6) for seconds in times), self.resident]


@dataclass(slots=True)
class Timeline:
    """The spans of one rank."""

    rank: int
    began: float = field(default_factory=time.monotonic)
    spans: dict[int, Span] = field(default_factory=dict)
    """Section -> its span in the first pass."""

    def now(self) -> float:
        """Seconds since the rank began."""
        return time.monotonic() - self.began

    def note(self, section: int, asked: float, got: float, ran: float, resident: int) -> None:
        """Keep the span of a section that is done with now."""
        if section not in self.spans:
            self.spans[section] = Span(self.rank, section, asked, got, ran, self.now(), resident)


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast answers came, seen from one rank."""

    first: float
    """Seconds until every prompt had its first token: the prefill through the cache, without comparisons."""
    others: float
    """Seconds in which all other tokens came."""
    steps: int
    """Passes that brought those."""
    tokens: int
    """All but the first of each prompt."""

    def as_dict(self) -> dict[str, float | None]:
        """As JSON has it; without a second token nothing is known of the time of one."""
        known = self.steps > 0 and self.others > 0
        return {
            "first_token_seconds": round(self.first, 4),
            "token_seconds": round(self.others / self.steps, 5) if known else None,
            "tokens_per_second": round(self.tokens / self.others, 3) if known else None,
        }


def summed(spans: Iterable[Span]) -> dict[str, Any]:
    """Seconds that ranks spent computing, and comparing, in the mean over ranks."""
    kept = list(spans)
    ranks = max(1, len({span.rank for span in kept}))
    return {
        "seconds_computing": round(sum(span.ran - span.got for span in kept) / ranks, 3),
        "seconds_comparing": round(sum(span.done - span.ran for span in kept) / ranks, 3),
    }
