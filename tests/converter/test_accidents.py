"""Accidents at any moment, over many families, plans, worker counts and parts: kills, failing calls, full disks.

Whatever stops a conversion, the same command goes on, and ends with the same bytes. RESHARD_ACCIDENTS_SEED chooses
other moments.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from converter.check import check
from converter.convert import convert
from converter.options import ConvertOptions
from converter.output.parts import Part
from converter.restore import restore
from shard_plans.documents.plan import NATIVE
from shard_plans.errors import OutputError, ReshardError
from shard_plans.layouts.registry import find_layout, lay_out_plan
from tests.tools import crash, power
from tests.tools.converted import bound, contents, converted, layouts_of
from tests.tools.little import write_little
from tests.tools.little_configs import CONFIGS, PLANS, little
from tests.tools.plans import make_plan

SEED = os.environ.get("RESHARD_ACCIDENTS_SEED", "0")
FAILING = (
    "pwrite",
    "write",
    "fsync",
    "rename",
    "unlink",
    "open",
    "preadv",
    "ftruncate",
    "posix_fallocate",
    "mkdir",
    "stat",
)
"""Calls that the system may refuse."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    crash.many_units(monkeypatch)


@dataclass(frozen=True)
class Job:
    """A little checkpoint, a plan, its layout, and in how many parts it is converted."""

    source: Path
    sizes: dict[str, int]
    layout: str
    parts: int
    expected: dict[str, bytes]
    calls: int
    """How many calls of `FAILING` one undisturbed part makes, at most."""

    def ready(self, out: Path, number: int, workers: int) -> Callable[[], object]:
        """What makes one part; all of the program is loaded, and the checkpoint opened, before it is called."""
        binding = bound(self.source)
        plan = find_layout(self.layout).chosen(binding, make_plan(binding, self.sizes))
        options, placement = ConvertOptions(part=Part(number, self.parts)), lay_out_plan(binding, plan)
        return lambda: convert(binding.checkpoint, binding, plan, placement, out, workers, None, options)

    def run(self, out: Path, number: int, workers: int) -> None:
        """Make one part."""
        self.ready(out, number, workers)()

    def finish(self, out: Path, dice: random.Random) -> None:
        """Give every command once more; the bytes must be those of an undisturbed conversion."""
        for number in dice.sample(range(1, self.parts + 1), self.parts):
            self.run(out, number, dice.choice((1, 2, 8)))  # of a finished output it clears away what a crash left
        assert contents(out) == self.expected


def jobs(folder: Path, dice: random.Random, count: int) -> Iterator[Job]:
    """Jobs of all families in turn."""
    for number in range(count):
        name = list(PLANS)[number % len(PLANS)]
        sizes, parts = dice.choice(PLANS[name]), dice.choice((1, 1, 2, 3))
        source = write_little(folder / f"source-{number}", CONFIGS[name], little(name), dice.choice((1, 2, 3)), number)
        whole, report = folder / f"whole-{number}", folder / "calls"
        layout = dice.choice(layouts_of(source, sizes))
        converted(source, whole, sizes, layout=layout)
        job = Job(source, sizes, layout, parts, contents(whole), 0)

        def counted(job: Job = job, out: Path = folder / f"counted-{number}") -> int:
            make = job.ready(out, 1, 1)
            asked = crash.at_call(FAILING, -1, crash.die)
            make()
            return asked()

        assert crash.forked(counted, report=report) == 0
        yield replace(job, calls=int(report.read_text()))


def disturbed(job: Job, out: Path, dice: random.Random, names: tuple[str, ...], act: Callable[[], None]) -> int:
    """Run a part in a child that meets an accident at a random call; returns its exit code, 3 where it was refused."""
    number, workers, call = dice.randint(1, job.parts), dice.choice((1, 2, 8)), dice.randint(1, job.calls)

    def work() -> None:
        make = job.ready(out, number, workers)
        crash.at_call(names, call, act)
        try:
            make()
        except ReshardError as error:
            assert str(error).isprintable()
            os._exit(3)

    code = crash.forked(work)
    assert code in (0, 3, -signal.SIGKILL), code
    if (out / "manifest.json").exists():
        assert check(out, job.source).failures == ()
    return code


def kill_often(folder: Path, seed: str, count: int) -> int:
    dice, kills = random.Random(seed), 0
    for number, job in enumerate(jobs(folder, dice, count)):
        out = folder / f"out-{number}"
        for _ in range(dice.randint(2, 4)):
            kills += disturbed(job, out, dice, crash.CALLS, crash.die) == -signal.SIGKILL
        job.finish(out, dice)
    return kills


def fail_often(folder: Path, seed: str, count: int) -> int:
    dice, refused = random.Random(seed), 0
    for number, job in enumerate(jobs(folder, dice, count)):
        out = folder / f"out-{number}"
        for _ in range(dice.randint(2, 4)):
            act = crash.fail(dice.choice((errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.ESTALE)))
            refused += disturbed(job, out, dice, FAILING, act) == 3
        job.finish(out, dice)
    return refused


def test_some_kills(tmp_path: Path) -> None:
    assert kill_often(tmp_path, f"{SEED}/kills", 2) > 0


def test_some_failing_calls(tmp_path: Path) -> None:
    assert fail_often(tmp_path, f"{SEED}/fails", 2) > 0


@pytest.mark.slow
def test_hundreds_of_kills(tmp_path: Path) -> None:
    assert kill_often(tmp_path, f"{SEED}/many kills", 120) > 200


@pytest.mark.slow
def test_hundreds_of_failing_calls(tmp_path: Path) -> None:
    assert fail_often(tmp_path, f"{SEED}/many fails", 90) > 100


@pytest.mark.slow
@pytest.mark.parametrize(("name", "parts"), [("deepseek_v3", 1), ("kimi_k3", 1), ("qwen3_moe", 2), ("gpt_oss", 3)])
def test_power_losses(tmp_path: Path, name: str, parts: int) -> None:
    """Other families and parts than test_power.py: the parts one after the other, power lost at any moment."""
    dice, sizes = random.Random(f"{SEED}/{name}"), PLANS[name][1]
    source = write_little(tmp_path / "source", CONFIGS[name], little(name))
    converted(source, tmp_path / "whole", sizes)
    job = Job(source, sizes, NATIVE, parts, contents(tmp_path / "whole"), 0)
    states: list[dict[str, bytes]] = []
    place = tmp_path / "here"
    place.mkdir()

    def moment(disk: power.Disk) -> None:
        if dice.random() < 0.15:
            states.append(disk.after_loss(dice))

    with pytest.MonkeyPatch.context() as patch:
        for _ in power.recorded(place, patch, moment):
            for number in range(1, parts + 1):
                job.run(place / "out", number, 1)
    assert len(states) > 10
    for number, state in enumerate(states):
        folder = tmp_path / str(number)
        for path, data in state.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
        if (folder / "out" / "manifest.json").exists():
            assert check(folder / "out", source).failures == ()
        job.finish(folder / "out", dice)
        shutil.rmtree(folder)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own of one MiB, where root may mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if os.geteuid() or not shutil.which("mount") or subprocess.run(words, capture_output=True).returncode:
        pytest.skip("no disk can be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.mark.parametrize("moment", [0.0, 0.3, 0.9])
def test_a_real_disk_that_fills_up(disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: float) -> None:
    """Another program takes what is left at some moment; when it has gone, the same command ends as it should."""
    monkeypatch.setattr("converter.streams.workers.INTERVAL", 0)
    monkeypatch.setattr("converter.forward.part.DOCUMENT_ROOM", 0)
    source = write_little(tmp_path / "source", CONFIGS["kimi_k3"], little("kimi_k3"))
    sizes, filler = PLANS["kimi_k3"][0], disk / "filler"
    converted(source, tmp_path / "whole", sizes)

    def fill(done: int = 1, total: int = 1) -> None:
        if done >= moment * total and not filler.exists():
            with open(filler, "wb", 0) as file:
                try:
                    while file.write(bytes(4096)):
                        pass
                except OSError:
                    pass

    if not moment:
        fill()
    try:
        converted(source, disk / "out", sizes, progress=fill)
    except OutputError as error:
        assert "No space left" in str(error) or "free" in str(error)
        assert not (disk / "out" / "manifest.json").exists()
    else:
        assert moment
    filler.unlink()
    converted(source, disk / "out", sizes)
    assert contents(disk / "out") == contents(tmp_path / "whole")
    fill(1, 1)
    with pytest.raises(OutputError):
        restore(disk / "out", disk / "back")
    assert not (disk / "back").exists()
