"""The journal of a conversion: which units are on the disk, with the digests of their chunks.

A line is written only after the bytes that it vouches for are on the disk, and every line has a sum of its own, so that
a torn tail is seen. Nothing in it is believed unless the bytes still have the digests.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from converter.output.partial import sync
from converter.streams.writing import write_fault
from shard_plans.checkpoints.headers import brief, load_json
from shard_plans.checkpoints.regular import read_regular
from shard_plans.errors import CheckpointError, OutputError

VERSION = 2
LIMIT = 1 << 30
"""Bytes of a journal; a larger one is refused unread."""
_UNIT = re.compile(r"[0-9]{1,15} ([0-9a-f]{32})+")
"""A line behind the first: the number of a unit and the digests of its chunks."""


def head(identity: str, units: str, family: str, seals: Mapping[str, str]) -> dict[str, Any]:
    """What a journal belongs to: the output, its units, the family table, and what tells each source file."""
    return {"version": VERSION, "identity": identity, "units": units, "family": family, "files": dict(seals)}


class Journal:
    """A journal file, which only one process writes; `add` may be called from one thread at a time."""

    def __init__(self, path: Path, belongs: dict[str, Any]) -> None:
        self.path, self.belongs = path, belongs
        self.entries = 0
        """Units that it vouches for."""
        self._handle: int | None = None

    def open(self) -> dict[int, bytes]:
        """Begin the journal, or go on with the one that is there: units and the digests of their chunks.

        Raises CheckpointError where a source file was changed since it was begun, OutputError where it is of
        something else.
        """
        try:
            raw = read_regular(self.path, LIMIT) if self.path.exists() else b""
            lines, end = _whole_lines(raw)
            if lines:
                self._compare(self._head(lines[0]))
            self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            os.ftruncate(self._handle, end)
            os.lseek(self._handle, 0, os.SEEK_END)
            if not lines:
                self._append([json.dumps(self.belongs, separators=(",", ":"))])
                sync(self.path.parent)
        except OSError as error:
            raise write_fault(self.path, error) from error
        found = {}
        for line in lines[1:]:
            number, digests = line.split(" ")
            found[int(number)] = bytes.fromhex(digests)
        self.entries = len(found)
        return found

    def add(self, units: Mapping[int, bytes]) -> None:
        """Vouch for units whose bytes are on the disk. Raises OutputError."""
        try:
            self._append([f"{number} {digests.hex()}" for number, digests in units.items()])
            self.entries += len(units)
        except OSError as error:
            raise write_fault(self.path, error) from error

    def _append(self, lines: list[str]) -> None:
        data = "".join(f"{_sum(line)} {line}\n" for line in lines).encode()
        while data and self._handle is not None:
            data = data[os.write(self._handle, data) :]
        if self._handle is not None:
            os.fsync(self._handle)

    def close(self) -> None:
        """Close the file."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _head(self, line: str) -> dict[str, Any]:
        """What the journal that lies here says that it belongs to. Raises OutputError where it says nothing."""
        try:
            found = load_json(line, str(self.path))
        except CheckpointError:
            found = None
        if not isinstance(found, dict) or not isinstance(found.get("files"), dict):
            raise OutputError(f"{self.path} doesn't begin as a journal does; begin again with --fresh")
        return found

    def _compare(self, found: dict[str, Any]) -> None:
        """Raise unless the journal that lies here belongs to what is done now."""
        for key in ("version", "identity"):
            self._equal(found, key)
        for name, now in self.belongs["files"].items():
            was = found["files"].get(name)
            if was != now:
                raise CheckpointError(
                    f"{name} was changed since the conversion in {self.path.parent} was begun: it "
                    f"{'was not there' if was is None else f'had {brief(was)}'}; now it has {now}; "
                    f"put back what it was, or begin again with --fresh"
                )
        for key in ("units", "family"):
            self._equal(found, key)

    def _equal(self, found: dict[str, Any], key: str) -> None:
        if found.get(key) != self.belongs[key]:
            raise OutputError(
                f"{self.path.parent} holds an unfinished conversion with another {key} ({brief(found.get(key))}, "
                f"now {self.belongs[key]}); begin again with --fresh, or choose another folder"
            )


def _sum(line: str) -> str:
    return xxhash.xxh3_64_hexdigest(line.encode())


def _whole_lines(raw: bytes) -> tuple[list[str], int]:
    """The lines up to the first that is torn or damaged, and where they end."""
    lines: list[str] = []
    end = 0
    for line in raw.splitlines(keepends=True):
        words = line.decode("ascii", "replace")
        if not words.endswith("\n") or words[:16] != _sum(words[17:-1]):
            break
        if lines and not _UNIT.fullmatch(words[17:-1]):
            break
        lines.append(words[17:-1])
        end += len(line)
    return lines, end
