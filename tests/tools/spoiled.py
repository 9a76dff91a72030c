"""An output of a tiny checkpoint that a test may spoil, and what the checks say of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from converter.check import CheckResult, check

SIZES = {"tp": 4, "ep": 2, "etp": 2, "pp": 1}
"""Scales are refined, experts cut and dealt out."""


@dataclass(frozen=True)
class Made:
    """A checkpoint and an output of it, which the test may spoil."""

    checkpoint: Path
    out: Path

    def shallow(self) -> CheckResult:
        """The check of hashes."""
        return check(self.out)

    def deep(self) -> CheckResult:
        """The check against the checkpoint."""
        return check(self.out, self.checkpoint)


def only(result: CheckResult) -> tuple[str, str | None, str]:
    """The one failure that is expected."""
    assert not result.passed
    assert len(result.failures) == 1, result.failures
    failure = result.failures[0]
    return failure.file, failure.tensor, failure.reason
