"""Dealing the files of an output to parts: whole stages where there are enough, else files of a stage."""

from __future__ import annotations

from collections.abc import Sequence

from converter.forward.shard_file import FileLayout


def deal(layouts: Sequence[FileLayout], count: int) -> list[list[FileLayout]]:
    """The files of each part, in order; parts have about as many bytes, and some none where there are more than files.

    Every file is in exactly one part.
    """
    stages: dict[int, list[FileLayout]] = {}
    for layout in layouts:
        stages.setdefault(layout.file.place["stage"], []).append(layout)
    items = list(stages.values()) if len(stages) >= count else [[layout] for layout in layouts]
    total = sum(layout.size for layout in layouts)
    parts: list[list[FileLayout]] = [[] for _ in range(count)]
    passed = 0
    for item in items:
        size = sum(layout.size for layout in item)
        parts[min(count - 1, (2 * passed + size) * count // (2 * total))] += item
        passed += size
    return parts
