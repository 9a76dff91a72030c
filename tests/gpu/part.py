"""One part of the device run: what it tried, within which time, and what it found."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Setting:
    """Where everything runs."""

    device: str
    checkpoints: Path
    """A cache of checkpoints (tests/checkpoints/cache.py)."""
    folder: Path
    """For outputs; removed at the end."""
    seconds: float
    """How long this part may go on to begin something new."""
    seed: int = 0
    gigabytes: float = 2.0
    """Size of the checkpoint that is loaded."""


@dataclass(slots=True)
class Part:
    """What came of it."""

    name: str
    of: int = 0
    """How much there is to try, ..."""
    done: int = 0
    """... and how much of it was tried."""
    failures: list[str] = field(default_factory=list)
    skipped: str = ""
    """Why nothing was tried."""
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Nothing that was tried failed."""
        return not self.failures

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**asdict(self), "passed": self.passed}

    def within(self, seconds: float, cells: Iterable[T]) -> Iterator[T]:
        """The cells, one after the other, until the time is up; at least one."""
        began = time.monotonic()
        for cell in cells:
            if self.done and time.monotonic() - began > seconds:
                return
            yield cell
            self.done += 1

    def worst(self, figure: str, value: float) -> None:
        """Keep the highest value of a figure."""
        self.figures[figure] = max(value, self.figures.get(figure, 0.0))
