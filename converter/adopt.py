"""Adopt: make an output of the folder that an engine's own tool wrote, by writing hashed manifests beside its files."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from converter.findings import CheckResult, summed_up
from converter.foreign.hashing import digests
from converter.foreign.matching import confirmed, match
from converter.foreign.recognise import recognise
from converter.foreign.writing import make_room, write
from converter.streams.workers import Progress
from shard_plans.documents.manifest import ROOT
from shard_plans.errors import OutputError


@dataclass(frozen=True, slots=True)
class AdoptResult:
    """What the folder was found to be."""

    layout: str
    tp: int
    pp: int
    ep: int
    files: int
    """Shard files."""
    tensors: int
    bytes_hashed: int
    seconds: float
    announced: bool
    """Whether a config.json alone said what the checkpoint held: how it was divided into files isn't known then."""


def look_at(folder: Path) -> CheckResult:
    """Compare names, types and shapes in an engine's folder with what its layout holds; there are no hashes to compare.

    Raises ManifestError where it is no such folder.
    """
    seen = recognise(folder, None, None)
    found = match(seen.foreign, seen.binding)
    tensors = sum(len(held) for held in seen.foreign.tensors.values())
    return replace(summed_up(len(seen.foreign.headers), tensors, found.failures), hashes=False)


def adopt(
    folder: Path,
    checkpoint: Path | None = None,
    family: Path | None = None,
    workers: int = 4,
    progress: Progress | None = None,
) -> AdoptResult:
    """Write manifests into an engine's folder, so that it is an output like those that convert makes.

    `checkpoint`: what the folder was made from, or its config.json; without it the folder's own config.json says what
    there was. Raises ManifestError where the folder isn't what a layout holds, OutputError where it is an output.
    """
    started = time.monotonic()
    if (folder / ROOT).exists():
        raise OutputError(f"{folder} has a {ROOT}: it is an output already")
    seen = recognise(folder, checkpoint, family)
    found = confirmed(seen.foreign, seen.binding)
    others = make_room(seen)
    hashed = digests(seen.foreign, workers, progress)
    write(seen, found, hashed, others)
    grid = found.plan.grid
    return AdoptResult(
        found.plan.layout, grid.tp, grid.pp, grid.ep, len(hashed), sum(map(len, hashed.values())),
        sum(int(header.sizes.sum()) for header in seen.foreign.headers.values()), time.monotonic() - started,
        seen.announced is not None,
    )  # fmt: skip
