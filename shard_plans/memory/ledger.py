"""The memory ledger: what each rank needs, in bytes, beside what its card has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One rank; everything but the first two fields in bytes."""

    rank: int
    stage: int
    weights: int
    """Payload of the rank's files, exact; with an engine's rules, what it makes of them."""
    kv_cache: int
    activations: int
    communication: int
    runtime: int
    total: int
    """Their sum, at the end of the ranges that the workload assumes."""
    capacity: int
    """The card's memory."""
    limit: int
    """The part of it that may be used."""
    low: int
    typical: int
    high: int
    """The same sum at the three ends of what can't be computed."""

    @property
    def headroom(self) -> int:
        """Bytes left; below zero where the rank doesn't fit."""
        return self.limit - self.total


COLUMNS = tuple(field.name for field in fields(LedgerRow))


def fits(ledger: Sequence[LedgerRow]) -> bool:
    """Whether every rank fits into the part of its card that may be used."""
    return all(row.headroom >= 0 for row in ledger)


def format_ledger(ledger: Sequence[LedgerRow]) -> str:
    """The ledger as a table of text, one rank a line."""
    rows = [COLUMNS, *(tuple(f"{value:,}" for value in astuple(row)) for row in ledger)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    return "".join("  ".join(word.rjust(width) for word, width in zip(row, widths, strict=True)) + "\n" for row in rows)
