"""What a check found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MOST = 200
"""Failures that a result lists; more are counted."""
SHORT = "is cut short or lost:"
"""What a failure says of a shard file that doesn't hold all that it should."""


@dataclass(frozen=True, slots=True, order=True)
class Failure:
    """One difference between what is stated and what is there."""

    file: str
    tensor: str | None
    """Native name, or the stored one where no shard tensor is at fault; None where it isn't about a tensor."""
    reason: str


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Whether an output is what its manifests say and, after a deep check, what the checkpoint says."""

    passed: bool
    files: int
    """Shard files looked at."""
    tensors: int
    """Shard tensors looked at."""
    failures: tuple[Failure, ...]
    absent: tuple[int, ...] = ()
    """Ranks of the plan that a partial output doesn't hold: nothing was checked for them."""
    skipped: int = 0
    """Stored tensors that the plan leaves out on purpose: no rank holds them, so none was compared."""
    hashes: bool = True
    """Whether there were any to compare; an engine's own folder has none."""


def summed_up(files: int, tensors: int, failures: Iterable[Failure], absent: tuple[int, ...] = ()) -> CheckResult:
    """The result, failures in a fixed order and not more than can be read."""
    found = sorted(set(failures), key=lambda failure: (failure.file, failure.tensor or "", failure.reason))
    listed = found[:MOST]
    if len(found) > MOST:
        listed.append(Failure("", None, f"{len(found) - MOST} more failures"))
    return CheckResult(not found, files, tensors, tuple(listed), absent)
