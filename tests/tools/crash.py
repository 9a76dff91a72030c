"""Conversions that are killed, or whose system calls fail, at a moment of the test's choosing."""

from __future__ import annotations

import errno
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from converter.forward import move, units
from converter.output.journal import Journal
from shard_plans.documents.plan import NATIVE
from tests.tools.converted import converted, small_chunks

CALLS = ("pwrite", "write", "fsync", "rename", "unlink", "open")
"""Calls by which a conversion changes what lies on the disk, or asks for it to be there."""


def many_units(patch: pytest.MonkeyPatch) -> None:
    """Small chunks and units, and an entry in the journal after each unit: tiny checkpoints have many moments."""
    small_chunks(patch, 4096)
    patch.setattr(units, "UNIT", 16 << 10)
    patch.setattr(move, "COMMIT", 0.0)


def at_call(names: tuple[str, ...], number: int, act: Callable[[], object], lasting: bool = False) -> Callable[[], int]:
    """Call `act` before the call of that number; returns how to ask how many there were. Patches `os` for good.

    What is `lasting` happens before every later call too.
    """
    count = 0

    def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == number or (lasting and count > number):
                act()
            return call(*arguments, **options)

        return counted

    for name in names:
        setattr(os, name, wrap(getattr(os, name)))
    return lambda: count


def die() -> None:
    """Be killed at once."""
    os.kill(os.getpid(), signal.SIGKILL)


def fail(number: int) -> Callable[[], None]:
    """What raises the system's error of that number."""

    def act() -> None:
        raise OSError(number, os.strerror(number))

    return act


NO_SPACE, BROKEN = fail(errno.ENOSPC), fail(errno.EIO)


def start(work: Callable[[], object], report: Path | None = None) -> int:
    """Do `work` in a child process; returns its number. What it returned is written into `report`."""
    child = os.fork()
    if not child:
        code = 99
        try:
            result = work()
            if report is not None:
                report.write_text(str(result))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def wait(child: int) -> int:
    """The exit code of a child; negative: of a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def forked(work: Callable[[], object], kill_after: float | None = None, report: Path | None = None) -> int:
    """Do `work` in a child process and wait for it; kill it after so many seconds, where they are given."""
    child = start(work, report)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    return wait(child)


def killed(folder: Path, out: Path, sizes: dict[str, int], call: int, workers: int = 2, layout: str = NATIVE) -> bool:
    """Convert in a child that is killed before its call of that number; whether it was."""

    def work() -> None:
        at_call(CALLS, call, die)
        converted(folder, out, sizes, workers=workers, layout=layout)

    code = forked(work)
    assert code in (0, -signal.SIGKILL)
    return code != 0


def killed_halfway(
    folder: Path, out: Path, sizes: dict[str, int], whole: int, workers: int = 2, share: float = 0.5, **options: Any
) -> bool:
    """Convert in a child that is killed once its journal vouches for that share of `whole` bytes; whether it was."""
    vouch = Journal.add

    def work() -> None:
        moves: list[move.Move] = []
        begin, done = move.Move.__init__, 0

        def begun(self: move.Move, *arguments: Any, **named: Any) -> None:
            begin(self, *arguments, **named)
            moves.append(self)

        def add(self: Journal, units: Mapping[int, bytes]) -> None:
            nonlocal done
            vouch(self, units)
            done += sum(moves[-1].units[number].nbytes for number in units)
            if done >= share * whole:
                die()

        move.Move.__init__, Journal.add = begun, add  # type: ignore[method-assign]
        converted(folder, out, sizes, workers=workers, **options)

    code = forked(work)
    assert code in (0, -signal.SIGKILL)
    return code != 0


def calls(folder: Path, out: Path, sizes: dict[str, int], workers: int = 2, layout: str = NATIVE) -> int:
    """How many calls an undisturbed conversion makes."""

    def work() -> int:
        count = at_call(CALLS, -1, die)
        converted(folder, out, sizes, workers=workers, layout=layout)
        return count()

    report = out.with_name("calls")
    assert forked(work, report=report) == 0
    return int(report.read_text())
