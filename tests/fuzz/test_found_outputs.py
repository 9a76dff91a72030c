"""What unfinished outputs, mutated, and failing disks brought to light, one test a kind."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from converter.check import check
from converter.output.journal import Journal, head
from converter.output.parts import Part, read_done
from shard_plans.checkpoints.regular import read_regular
from shard_plans.documents.manifest import MARKER
from shard_plans.errors import (
    CheckpointError,
    ManifestError,
    OutputError,
    using,
)
from tests.fuzz.conftest import SIZES
from tests.tools.cli import RunCli
from tests.tools.converted import converted


@pytest.mark.parametrize(
    "marker",
    [
        {"parts": 10**9}, {"parts": -1}, {"parts": 1.5}, {"parts": True}, {"parts": "2"}, {"plan": 3}, {"source": "x"},
        {"ranks": "0-99999999"},
    ],
)  # fmt: skip
def test_a_marker_is_no_reason_to_look_for_a_billion_parts(tmp_path: Path, marker: dict[str, object]) -> None:
    good = {"plan": "0" * 32, "source": "1" * 32, "parts": 3}
    (tmp_path / "conversion.partial").write_text(json.dumps(good))
    with pytest.raises(ManifestError, match="parts 1-3 of 3 are missing"):
        check(tmp_path)
    for text in (json.dumps(good | marker), "[" * 100_000, '{"parts": Infinity}', "é"):
        (tmp_path / "conversion.partial").write_text(text)
        with pytest.raises(ManifestError, match=r"isn't finished$"):
            check(tmp_path)


def test_what_is_missing_is_looked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / MARKER).write_text(json.dumps({"plan": "0" * 32, "source": "1" * 32, "parts": 65536}))
    looked: list[int] = []

    def look(folder: Path, count: int) -> dict[int, tuple[()]]:
        looked.append(count)
        return {7: ()}

    monkeypatch.setattr("converter.output.parts.read_done", look)
    with pytest.raises(ManifestError, match="parts 1-6,8-65536 of 65536 are missing"):
        check(tmp_path)
    assert looked == [65536]


def test_many_parts_are_not_looked_for_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "conversion-2-of-100000.done").write_text("[]")
    opened: list[Path] = []

    def read(path: Path, limit: int) -> bytes:
        opened.append(path)
        return read_regular(path, limit)

    monkeypatch.setattr("converter.output.parts.read_regular", read)
    assert read_done(tmp_path, 100_000) == {2: ()}
    assert len(opened) == 1


def test_a_pipe_in_place_of_a_marker_isn_t_waited_for(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    os.mkfifo(out / "conversion.partial")
    with pytest.raises(ManifestError, match="isn't finished"):
        check(out)
    converted(source, out, SIZES)
    assert check(out, source).passed


def lose_a_file(entries: list[list[object]]) -> None:
    del entries[0]


def lose_the_digest(entries: list[list[object]]) -> None:
    entries[0][3] = "0" * 32


def swap_manifests(entries: list[list[object]]) -> None:
    entries[0][1], entries[1][1] = entries[1][1], entries[0][1]


@pytest.mark.parametrize("spoil", [lose_a_file, lose_the_digest, swap_manifests], ids=lambda spoil: spoil.__name__)
def test_a_parts_record_is_compared_with_what_lies_there(
    source: Path, tmp_path: Path, spoil: Callable[[list[list[object]]], None]
) -> None:
    """The root manifest would state what nothing has, and name files that no one made."""
    out = tmp_path / "out"
    converted(source, out, SIZES, part=Part(1, 2))
    path = out / "conversion-1-of-2.done"
    entries = json.loads(path.read_text())
    spoil(entries)
    path.write_text(json.dumps(entries))
    with pytest.raises(OutputError, match="--fresh"):
        converted(source, out, SIZES, part=Part(2, 2))
    assert not (out / "manifest.json").exists()
    converted(source, out, SIZES, part=Part(1, 2), fresh=True)
    assert check(out, source).passed


@pytest.mark.parametrize(
    "text",
    [
        '[["a", "b", Infinity, "c"]]', '[["a", "b", 1e400, "c"]]', "[" * 100_000, '[["../a", "b", 1, "0"]]', "3",
        '[["a"]]',
        '[["a", "b", -1, "00000000000000000000000000000000"]]', '[["a", "b", 1, null]]', '{"a": 1}', "é",
    ],
)  # fmt: skip
def test_a_parts_record_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "conversion-1-of-1.done").touch()
    (tmp_path / "conversion-1-of-2.done").write_text(text)
    with pytest.raises(OutputError, match=r"conversion-1-of-2.done can't be read .* make part 1 again"):
        read_done(tmp_path, 2)


def lines(*words: str) -> bytes:
    """A journal of these lines, with right sums."""
    return "".join(f"{xxhash.xxh3_64_hexdigest(line.encode())} {line}\n" for line in words).encode()


def test_journals_that_say_nothing_are_refused(tmp_path: Path) -> None:
    belongs = head("it", "0", "1", {"a": "b"})
    path = tmp_path / "journal"
    for first in ("3", "[]", "{}", '{"files": 3}', "[" * 10_000, "x", ""):
        path.write_bytes(lines(first))
        with pytest.raises(OutputError, match="begin again with --fresh"):
            Journal(path, belongs).open()
    for files in ({}, {"a": 3}, {"a": ["x"] * 9999}):
        path.write_bytes(lines(json.dumps(belongs | {"files": files})))
        with pytest.raises(CheckpointError, match="put back what it was"):
            Journal(path, belongs).open()


@pytest.mark.parametrize("line", ["", "1", "-1 {}", "1 {} {}", "1 zz", "1 00", "x {}", "1.0 {}", "9" * 30 + " {}"])
def test_a_journal_ends_before_a_line_that_vouches_for_nothing(tmp_path: Path, line: str) -> None:
    belongs, digest = head("it", "0", "1", {}), "0" * 32
    path = tmp_path / "journal"
    path.write_bytes(lines(json.dumps(belongs), f"0 {digest}", line.replace("{}", digest), f"2 {digest}"))
    journal = Journal(path, belongs)
    assert journal.open() == {0: bytes(16)}
    journal.close()
    assert path.read_bytes() == lines(json.dumps(belongs), f"0 {digest}")


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.EIO, "Input/output error; see to the disk"), (errno.EACCES, "Permission denied; see to its permissions")],
)
def test_a_disk_that_fails_is_no_fault_of_the_program(
    source: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), "a/file")

    monkeypatch.setattr("converter.cli.check", broken)
    ran = run_cli("check", source, "--json", code=2)
    assert ran.stderr == f"reshard check: a/file can't be used: {words}, and run again\n"
    assert ran.json["error"]["kind"] == "ReshardError"


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_an_output_that_can_not_be_begun_is_refused(
    source: Path, tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The very first write met a full disk: that was no sentence."""

    def refused(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises(OutputError, match="No space left on device"):
        patch.setattr(os, call, refused)
        converted(source, tmp_path / "out", SIZES)
    converted(source, tmp_path / "out", SIZES)
    assert check(tmp_path / "out", source).passed


def test_what_nobody_reads_is_no_fault_of_the_disk() -> None:
    """Progress is printed on the way: a closed pipe must end the command as such, not as a fault of the output."""
    with pytest.raises(BrokenPipeError), using("out", OutputError):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")
    with (
        pytest.raises(OutputError, match="out can't be used: Input/output error; see to the disk"),
        using("out", OutputError),
    ):
        raise OSError(errno.EIO, "Input/output error")
