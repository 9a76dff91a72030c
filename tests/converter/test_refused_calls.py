"""Each call of the system in turn is refused: what was asked for says so in a sentence, and leaves nothing wrong."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from converter.check import check
from converter.convert import convert
from converter.options import ConvertOptions
from converter.output.parts import Part
from converter.restore import restore
from shard_plans.errors import ReshardError
from shard_plans.layouts.registry import lay_out_plan
from tests.tools import crash
from tests.tools.converted import bound, contents, converted
from tests.tools.little import write_little
from tests.tools.little_configs import CONFIGS, little
from tests.tools.plans import make_plan

NAME, SIZES = "llama", {"tp": 2}
CALLS = (*crash.CALLS, "preadv", "ftruncate", "posix_fallocate", "mkdir", "stat", "listdir", "scandir")
REFUSED = 3
Work = Callable[[], object]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    crash.many_units(monkeypatch)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_little(tmp_path / "source", CONFIGS[NAME], little(NAME), 2, 0)


def conversion(source: Path, out: Path, part: Part) -> Work:
    """What converts, once everything that it is given was read."""
    binding = bound(source)
    plan = make_plan(binding, SIZES)
    placement, options = lay_out_plan(binding, plan), ConvertOptions(part=part, sha256=True)
    return lambda: convert(binding.checkpoint, binding, plan, placement, out, 1, None, options)


def interrupt(source: Path, out: Path) -> None:
    """Leave a conversion that was killed on its way."""

    def work() -> None:
        make = conversion(source, out, Part())
        crash.at_call(crash.CALLS, 40, crash.die)
        make()

    crash.forked(work)
    assert out.exists() and not (out / "manifest.json").exists()


BEFORE: dict[str, Callable[[Path, Path], object]] = {
    "new": lambda source, out: None,
    "interrupted": interrupt,
    "finished": lambda source, out: converted(source, out, SIZES),
    "last part": lambda source, out: converted(source, out, SIZES, part=Part(1, 2)),
}
"""What lies in the output when the conversion begins."""


def refuse_each(ready: Callable[[], Work], tidy: Callable[[], object], step: int, report: Path) -> int:
    """Refuse one call after the other, in a process each; how many times that was told in a sentence."""

    def counted() -> int:
        make = ready()
        asked = crash.at_call(CALLS, -1, crash.die)
        make()
        return asked()

    tidy()
    assert crash.forked(counted, report=report) == 0
    told, count = 0, int(report.read_text())
    for call in range(1 + count % step, count + 1, step):
        tidy()

        def work(call: int = call) -> None:
            make = ready()
            crash.at_call(CALLS, call, crash.fail((errno.ESTALE, errno.EIO, errno.EACCES)[call % 3]))
            try:
                make()
            except ReshardError as error:
                assert str(error).isprintable()
                os._exit(REFUSED)

        code = crash.forked(work)
        assert code in (0, REFUSED), f"call {call} of {count}"
        told += code == REFUSED
    assert told > count // step // 2
    return told


@pytest.mark.parametrize("step", [19, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("before", list(BEFORE))
def test_of_a_conversion(tmp_path: Path, source: Path, before: str, step: int) -> None:
    out, part = tmp_path / "out", Part(2, 2) if before == "last part" else Part()

    def tidy() -> None:
        if out.exists() and (out / "manifest.json").exists():
            assert check(out, source).failures == ()
        shutil.rmtree(out, ignore_errors=True)
        BEFORE[before](source, out)

    refuse_each(lambda: conversion(source, out, part), tidy, step, tmp_path / "count")
    conversion(source, out, part)()
    assert check(out, source).failures == ()


@pytest.mark.parametrize("step", [19, pytest.param(1, marks=pytest.mark.slow)])
def test_of_a_restoration(tmp_path: Path, source: Path, step: int) -> None:
    out, back = tmp_path / "out", tmp_path / "back"
    converted(source, out, SIZES)
    refuse_each(
        lambda: lambda: restore(out, back), lambda: shutil.rmtree(back, ignore_errors=True), step, tmp_path / "n"
    )
    shutil.rmtree(back, ignore_errors=True)
    restore(out, back)
    assert contents(back) == contents(source)


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("deep", [False, True])
def test_of_a_check(tmp_path: Path, source: Path, deep: bool, step: int) -> None:
    """It fails, or says that it couldn't be made: what wasn't read is never taken for right."""
    out = tmp_path / "out"
    converted(source, out, SIZES)

    def looked() -> None:
        if not check(out, source if deep else None).passed:
            os._exit(REFUSED)

    refuse_each(lambda: looked, lambda: None, step, tmp_path / "count")
