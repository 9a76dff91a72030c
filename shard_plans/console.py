"""What all verbs share on a terminal: results on stdout, progress and remarks on stderr."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

WIDEST = 1000
"""Characters of a table's line at most."""
LINE_EVERY = 5.0
"""Seconds between progress lines where stderr isn't a terminal."""

Advance = Callable[[int, int], None]
"""Called with what is done and what there is in all."""
ShowProgress = Callable[[str, str], AbstractContextManager[Advance]]
"""Makes the display of one long step: what it is and in which unit it counts (bytes, layers)."""


class _Out(Console):
    """Standard output: one that nobody reads any more ends the command, as it does without rich."""

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError, in the place of rich's exit code 1, which would mean that a check failed."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def out() -> Console:
    """Standard output, for people."""
    return _Out(highlight=False, soft_wrap=not sys.stdout.isatty())


def show_figures(table: Table) -> None:
    """A table as wide as its figures are, on stdout: what is narrower than it wraps lines, no digit is left out."""
    console = out()
    console.width = max(console.width, console.measure(table, options=console.options.update(width=WIDEST)).maximum)
    console.print(table, crop=False)


def remark(text: str) -> None:
    """A sentence on stderr."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(text, markup=False)


def emit(data: dict[str, Any]) -> None:
    """One JSON object on stdout."""
    sys.stdout.write(json.dumps(data, indent=1, allow_nan=False) + "\n")
    sys.stdout.flush()


def size(count: float) -> str:
    """Bytes in words: 1.56 TB (1e12 bytes), 20.8 GB, 34 kB, 12 B; minus signs are kept."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= scale:
            return f"{count / scale:.3g} {unit}" if abs(count) < 999.5 * scale else f"{count / scale:.0f} {unit}"
    return f"{count:.0f} B"


@contextmanager
def progress(what: str, unit: str = "bytes") -> Iterator[Advance]:
    """A bar on a terminal, a line every few seconds elsewhere; both on stderr."""
    counted = unit == "bytes"
    if sys.stderr.isatty():
        numbers = (DownloadColumn(), TransferSpeedColumn()) if counted else (MofNCompleteColumn(), TextColumn(unit))
        columns = (TextColumn("{task.description}"), BarColumn(), *numbers, TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
            task = bars.add_task(what, total=None)
            yield lambda done, total: bars.update(task, completed=done, total=total)
        return
    started = told = time.monotonic()

    def line(done: int, total: int) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told < LINE_EVERY:
            return
        told, rate = now, done / (now - started)
        left = f", {(total - done) / rate:.0f} s left" if rate else ""
        words = f"{size(done)} of {size(total)}, {size(rate)}/s" if counted else f"{done} of {total} {unit}"
        remark(f"{what}: {words}{left}")

    yield line
