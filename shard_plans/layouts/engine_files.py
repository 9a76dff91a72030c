"""Names of the files that engines' own tools write: whose they are, and which rank's."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shard_plans.errors import ManifestError

NAMES = {
    "vllm": (
        re.compile(r"model-rank-(?P<tp>\d+)-part-\d+\.safetensors"),
        re.compile(r"model-pp-(?P<stage>\d+)-tp-(?P<tp>\d+)-part-\d+\.safetensors"),
    ),
    "deepseek": (re.compile(r"model(?P<tp>\d+)-mp(?P<ranks>\d+)\.safetensors"),),
}
"""Engine -> how it calls them."""


@dataclass(frozen=True, slots=True)
class EngineFiles:
    """The shard files in a folder, by the place of their rank."""

    engine: str
    """vllm or deepseek."""
    places: Mapping[tuple[int, int], tuple[str, ...]]
    """(stage, tp) -> file names."""

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return 1 + max(stage for stage, _ in self.places)

    @property
    def ranks(self) -> int:
        """Ranks of a stage."""
        return 1 + max(tp for _, tp in self.places)


def engine_files(folder: Path) -> EngineFiles | None:
    """What lies in `folder`; None where nothing there is named as engines do.

    Raises ManifestError where files of several kinds are mixed, or a rank's are missing.
    """
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    kinds: dict[tuple[str, str], dict[tuple[int, int], list[str]]] = {}
    for engine, patterns in NAMES.items():
        for pattern in patterns:
            for match in filter(None, map(pattern.fullmatch, names)):
                found = match.groupdict()
                kind = engine, found.get("ranks", pattern.pattern)
                place = int(found.get("stage", 0)), int(found["tp"])
                kinds.setdefault(kind, {}).setdefault(place, []).append(match[0])
    if not kinds:
        return None
    if len(kinds) > 1:
        mixed = ", ".join(files[min(files)][0] for files in kinds.values())
        raise ManifestError(f"{folder} holds files of several conversions ({mixed}); leave those of one")
    (((engine, told), places),) = kinds.items()
    files = EngineFiles(engine, {place: tuple(those) for place, those in sorted(places.items())})
    ranks = int(told) if engine == "deepseek" else files.ranks
    if ranks > 1 << 16 or files.stages > 1 << 16:
        raise ManifestError(f"{folder} has files of ranks up to {ranks} and stages up to {files.stages}; no engine has")
    if files.ranks > ranks:
        raise ManifestError(
            f"{folder} has a file of rank {files.ranks - 1}, by its name of {ranks} ranks; it is no part"
        )
    for stage in range(files.stages):
        for tp in range(ranks):
            if (stage, tp) not in files.places:
                raise ManifestError(f"{folder} lacks the files of rank {tp} of {ranks} on stage {stage}; copy them too")
    return files
