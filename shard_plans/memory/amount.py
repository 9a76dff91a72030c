"""Bytes that may not be known exactly: the low, the typical and the high end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

ENDS = ("low", "typical", "high")
"""The ends of a range; a plan is counted at one of them."""


@dataclass(frozen=True, slots=True)
class Amount:
    """Bytes; the three ends are equal where a formula gives the figure exactly."""

    low: int
    typical: int
    high: int

    def __add__(self, other: Amount) -> Amount:
        """End by end."""
        return Amount(self.low + other.low, self.typical + other.typical, self.high + other.high)

    def __mul__(self, times: int) -> Amount:
        """Each end so many times."""
        return Amount(self.low * times, self.typical * times, self.high * times)

    def at(self, end: str) -> int:
        """The bytes at one of ENDS."""
        return {"low": self.low, "typical": self.typical, "high": self.high}[end]


NOTHING = Amount(0, 0, 0)


def exactly(number: int) -> Amount:
    """An amount that is known."""
    return Amount(number, number, number)


def total(amounts: Iterable[Amount]) -> Amount:
    """Their sum."""
    return sum(amounts, NOTHING)
