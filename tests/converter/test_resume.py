"""Interrupted conversions go on where they were, trust nothing unread, and end with the same bytes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from converter.check import check
from converter.forward.batches import make_batches
from converter.forward.grouping import make_groups
from converter.forward.shard_file import lay_out
from converter.forward.units import make_units
from converter.output.parts import LOCK
from shard_plans.documents.manifest import MARKER
from shard_plans.errors import CheckpointError, OutputError
from shard_plans.placement.place import place
from tests.conftest import MakeCheckpoint
from tests.tools import crash, tamper
from tests.tools.converted import bound, contents, converted
from tests.tools.plans import make_plan

JOURNAL = "conversion.journal"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    crash.many_units(monkeypatch)


class Halfway:
    """A conversion that was killed when about half was done."""

    def __init__(self, folder: Path, tmp_path: Path) -> None:
        self.folder, self.out, self.sizes = folder, tmp_path / "out", {"tp": 2}
        converted(folder, tmp_path / "undisturbed", self.sizes)
        self.expected = contents(tmp_path / "undisturbed")
        self.total = sum(len(data) for name, data in self.expected.items() if name.endswith(".safetensors"))
        assert crash.killed_halfway(folder, self.out, self.sizes, self.total)

    def again(self, fresh: bool = False) -> int:
        """Convert again; the end must be the same bytes. Returns how many bytes were kept."""
        result = converted(self.folder, self.out, self.sizes, fresh=fresh)
        assert contents(self.out) == self.expected
        assert result.bytes_kept + result.bytes_written < self.total
        return result.bytes_kept


@pytest.fixture
def halfway(own_tiny: MakeCheckpoint, tmp_path: Path) -> Halfway:
    return Halfway(own_tiny("llama"), tmp_path)


def test_what_was_done_is_not_done_again(halfway: Halfway) -> None:
    assert halfway.again() > halfway.total // 3


def test_a_fresh_start_keeps_nothing(halfway: Halfway) -> None:
    assert halfway.again(fresh=True) == 0


def spoil_data(out: Path) -> None:
    for path in out.glob("*.safetensors.partial"):
        path.write_bytes(bytes(path.stat().st_size))


def spoil_length(out: Path) -> None:
    for path in out.glob("*.safetensors.partial"):
        tamper.truncate(path)


def lose_files(out: Path) -> None:
    for path in out.glob("*.safetensors.partial"):
        path.unlink()


def spoil_first_entry(out: Path) -> None:
    tamper.flip(out / JOURNAL, (out / JOURNAL).read_bytes().index(b"\n") + 20)


def spoil_head(out: Path) -> None:
    tamper.flip(out / JOURNAL, 40)


def lose_journal(out: Path) -> None:
    (out / JOURNAL).unlink()


SPOILS = [spoil_data, spoil_length, lose_files, spoil_first_entry, spoil_head, lose_journal]


@pytest.mark.parametrize("spoil", SPOILS, ids=lambda spoil: spoil.__name__)
def test_nothing_is_trusted_unread(halfway: Halfway, spoil: Callable[[Path], None]) -> None:
    """The journal vouches for bytes that aren't there, or is itself damaged: those units are done again."""
    spoil(halfway.out)
    assert halfway.again() == 0


def test_one_damaged_unit_is_done_again(halfway: Halfway) -> None:
    whole = {name: data for name, data in halfway.expected.items() if name.endswith("tp-0.safetensors")}
    ((name, data),) = whole.items()
    partial_file = halfway.out / f"{name}.partial"
    here = partial_file.read_bytes()
    start = next(at for at in range(8192, len(data), 4096) if here[at : at + 64] == data[at : at + 64] != bytes(64))
    tamper.flip(partial_file, start)
    assert halfway.again() > 0


def test_a_torn_journal_loses_its_tail_alone(halfway: Halfway) -> None:
    tamper.truncate(halfway.out / JOURNAL, 5)
    assert halfway.again() > 0


def touch(path: Path) -> None:
    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 10**9))


def replace_file(path: Path) -> None:
    status, data = path.stat(), path.read_bytes()
    other = path.with_name("other")
    other.write_bytes(data)
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.rename(path)


@pytest.mark.parametrize("change", [touch, replace_file], ids=lambda change: change.__name__)
def test_a_source_changed_since_is_named(halfway: Halfway, change: Callable[[Path], None]) -> None:
    path = sorted(halfway.folder.glob("model-00002*"))[0]
    change(path)
    before = contents(halfway.out)
    with pytest.raises(CheckpointError, match=rf"{path.name} was changed since .* was begun: it had .* now it has"):
        converted(halfway.folder, halfway.out, halfway.sizes)
    assert {k: v for k, v in before.items() if k != LOCK} == contents(halfway.out)
    assert halfway.again(fresh=True) == 0


def test_another_unfinished_conversion_is_left_alone(halfway: Halfway) -> None:
    for fresh in (False, True):
        with pytest.raises(OutputError, match="unfinished conversion by plan"):
            converted(halfway.folder, halfway.out, {"tp": 4}, fresh=fresh)
    assert (halfway.out / MARKER).exists()
    assert halfway.again() > 0


@pytest.mark.parametrize(
    ("names", "act", "error", "words"),
    [
        (("pwrite",), crash.NO_SPACE, OutputError, "No space left"),
        (("pwrite",), crash.BROKEN, OutputError, "Input/output error"),
        (("fsync",), crash.BROKEN, OutputError, "Input/output error"),
        (("preadv",), crash.BROKEN, CheckpointError, "can't be read at byte .* Input/output error"),
    ],
)
def test_a_failing_system_is_survived(
    tiny: MakeCheckpoint,
    tmp_path: Path,
    names: tuple[str, ...],
    act: Callable[[], None],
    error: type[Exception],
    words: str,
) -> None:
    folder, out, sizes = tiny("qwen3_moe_fp8"), tmp_path / "out", {"tp": 2, "ep": 2}

    def work() -> None:
        crash.at_call(names, 12, act, lasting=names == ("preadv",))  # what is read ahead is read a second time
        with pytest.raises(error, match=words):
            converted(folder, out, sizes)

    assert crash.forked(work) == 0
    assert (out / JOURNAL).exists()
    assert converted(folder, out, sizes).bytes_kept > 0
    converted(folder, tmp_path / "undisturbed", sizes)
    assert contents(out) == contents(tmp_path / "undisturbed")


@pytest.mark.parametrize("change", [touch, replace_file, tamper.truncate], ids=lambda change: change.__name__)
def test_a_source_that_changes_midway_is_named_and_nothing_kept(
    own_tiny: MakeCheckpoint, tmp_path: Path, change: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = own_tiny("llama_single")
    changed: list[bool] = []

    def meddle(done: int, total: int) -> None:
        if done > total // 2 and not changed:
            changed.append(True)
            change(folder / "model.safetensors")

    monkeypatch.setattr("converter.streams.workers.INTERVAL", 0)
    with pytest.raises(CheckpointError, match=r"model.safetensors (was changed|ends at byte)"):
        converted(folder, tmp_path / "out", progress=meddle)
    assert not (tmp_path / "out").exists()


def test_a_crash_at_the_very_end_does_no_harm(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    """The root manifest is there, what belongs to the conversion wasn't removed yet."""
    converted(tiny("llama"), tmp_path / "out")
    for name in (JOURNAL, MARKER, LOCK):
        (tmp_path / "out" / name).write_text("left")
    assert check(tmp_path / "out").passed
    assert converted(tiny("llama"), tmp_path / "out").bytes_written == 0
    assert not any((tmp_path / "out" / name).exists() for name in (JOURNAL, MARKER, LOCK))


def test_batches_begin_with_any_unit(tiny: MakeCheckpoint) -> None:
    """What is left to do may begin with rows of any stored tensor; every unit is in one batch."""
    binding = bound(tiny("llama_single"))
    layouts = [lay_out(file, "0" * 32, "0" * 32) for file in place(binding, make_plan(binding)).files]
    units = make_units(make_groups(layouts, binding.checkpoint), binding.checkpoint)
    for first in range(len(units)):
        left = list(range(first, len(units)))
        batches = make_batches(units, left, binding.checkpoint, 1 << 20)
        assert [number for batch in batches for number in batch] == left
