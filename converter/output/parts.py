"""Parts of one conversion, made by different processes or machines in one shared folder."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converter.output.identity import MOST_PARTS, parse_marker
from converter.output.partial import write_through
from converter.streams.writing import write_fault
from shard_plans.checkpoints.headers import brief, load_json
from shard_plans.checkpoints.regular import read_regular
from shard_plans.documents.digests import DIGEST
from shard_plans.documents.manifest import MARKER, ManifestFile
from shard_plans.documents.shard_manifest import PLAIN_NAME
from shard_plans.errors import CheckpointError, OutputError, PlanError
from shard_plans.placement.experts import format_ids

LOCK = "conversion.lock"
"""Locked by the process that writes what belongs to no part."""
MARKER_LIMIT = 1 << 20
RECORD_LIMIT = 1 << 28
"""Bytes of a marker and of a part's record; larger ones are refused unread."""
_LEFTOVER = re.compile(r"conversion(-[0-9]+-of-[0-9]+)?\.(partial|journal|lock|done|new)")


@dataclass(frozen=True, slots=True)
class Part:
    """One part of several; parts are counted from 1."""

    number: int = 1
    count: int = 1

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @property
    def stem(self) -> str:
        """How the names of its own journal, lock and record begin."""
        return "conversion" if self.count == 1 else f"conversion-{self.number}-of-{self.count}"


def is_leftover(name: str) -> bool:
    """Whether a file in an output folder belongs to a conversion at work, or is left of one; such files do no harm."""
    return _LEFTOVER.fullmatch(name) is not None


def parse_part(text: str) -> Part:
    """`2/8` -> the second of eight parts. Raises PlanError."""
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    part = Part(int(match[1]), int(match[2])) if match else None
    if part is None or not 1 <= part.number <= part.count <= MOST_PARTS:
        raise PlanError(f"--part {text!r} isn't I/N with I from 1 to N, such as 1/8")
    return part


def part_from_environment(environment: Mapping[str, str]) -> tuple[Part, str] | None:
    """The part of this process under torchrun or srun, and which of them it was; None elsewhere.

    Job arrays aren't looked at: their tasks may well convert different checkpoints. Give them --part.
    """
    for rank, world, sign, who in (
        ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "torchrun"),
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID", "srun"),
    ):
        words = environment.get(rank, ""), environment.get(world, "")
        if sign in environment and all(word.isdecimal() for word in words):
            number, count = int(words[0]) + 1, int(words[1])
            if 1 <= number <= count and count > 1:
                return Part(number, count), who
    return None


def record_done(folder: Path, part: Part, files: Sequence[ManifestFile]) -> None:
    """Say that a part is finished, and what it made."""
    listed = [[file.name, file.manifest, file.size, file.xxh3] for file in files]
    path = folder / f"{part.stem}.done"
    try:
        write_through(f"{part.stem}.new", path, json.dumps(listed).encode())
    except OSError as error:
        raise write_fault(path, error) from error


def read_done(folder: Path, count: int) -> dict[int, tuple[ManifestFile, ...]]:
    """What each finished part made, by its number."""
    found = {}
    there = {path.name for path in folder.glob("conversion-*.done")}  # looked for once, however many parts are claimed
    for number in range(1, count + 1):
        path = folder / f"{Part(number, count).stem}.done"
        if path.name not in there:
            continue
        try:
            listed = load_json(read_regular(path, RECORD_LIMIT).decode("ascii"), "it")
            found[number] = tuple(_recorded(*entry) for entry in listed)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, TypeError, CheckpointError) as error:
            raise OutputError(f"{path} can't be read ({error}); remove it, and make part {number} again") from error
    return found


def _recorded(name: Any, manifest: Any, size: Any, xxh3: Any) -> ManifestFile:
    """One entry of a record. Raises ValueError where it can't be one."""
    words = all(type(word) is str for word in (name, manifest, xxh3))
    if not words or not all(PLAIN_NAME.fullmatch(word) for word in (name, manifest)) or not DIGEST.fullmatch(xxh3):
        raise ValueError(f"{brief([name, manifest, xxh3])} names no file with its manifest and digest")
    if type(size) is not int or size < 0:
        raise ValueError(f"{brief(size)} is no size")
    return ManifestFile(name, manifest, size, xxh3)


def unfinished_words(folder: Path) -> str:
    """Which parts of an unfinished output are missing, as the end of a sentence; empty where it isn't in parts."""
    try:
        count = parse_marker(read_regular(folder / MARKER, MARKER_LIMIT)).parts
        done = read_done(folder, count)
    except (OSError, ValueError, OutputError):
        return ""
    if count == 1:
        return ""
    missing = [number for number in range(1, count + 1) if number not in done]
    if not missing:
        return f": all {count} parts are made, but the manifest isn't; give the command of any part again"
    noun, verb = ("part", "is") if len(missing) == 1 else ("parts", "are")
    return f": {noun} {format_ids(missing)} of {count} {verb} missing"
