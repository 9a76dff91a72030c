"""Pipes, folders, links and devices in the place of files: refused in words, nothing is waited for or followed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from converter.check import check
from converter.output.parts import Part
from shard_plans.errors import OutputError
from tests.fuzz.conftest import SIZES
from tests.tools.cli import RunCli
from tests.tools.converted import contents, converted

KINDS = ("pipe", "folder", "loop", "away", "device", "empty", "gone")


def substitute(path: Path, kind: str) -> None:
    """Another kind of thing in place of the file."""
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "away":
        path.symlink_to("/etc/passwd")
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "empty":
        path.touch()


@pytest.mark.parametrize("kind", KINDS)
def test_other_things_in_place_of_a_checkpoints_files(source: Path, tmp_path: Path, run_cli: RunCli, kind: str) -> None:
    for name in sorted(contents(source)):
        kept = (source / name).read_bytes()
        substitute(source / name, kind)
        for words in (("inspect", source), ("convert", source, tmp_path / "out", "--tp", 2, "--ep", 2)):
            ran = run_cli(*words, code=2)
            assert ran.stderr.startswith("reshard ") and ran.stderr.count("\n") == 1, ran.stderr
        assert not (tmp_path / "out").exists()
        _mend(source / name, kept)


@pytest.mark.parametrize("kind", KINDS)
def test_other_things_in_place_of_an_outputs_files(source: Path, tmp_path: Path, run_cli: RunCli, kind: str) -> None:
    out = tmp_path / "out"
    converted(source, out, SIZES)
    for name, kept in sorted(contents(out).items()):
        substitute(out / name, kind)
        assert run_cli("check", out, code=None).exit_code in ((1, 2) if name == "manifest.json" else (1,))
        ran = run_cli("restore", out, tmp_path / "back", code=None)
        assert ran.exit_code in (1, 2) and ran.stderr.count("\n") == 1, ran.stderr
        assert not (tmp_path / "back").exists()
        _mend(out / name, kept)
    assert check(out, source).passed


def _mend(path: Path, data: bytes) -> None:
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def test_what_lies_in_an_unfinished_output_may_be_anything(source: Path, tmp_path: Path) -> None:
    """Whatever stands where the next part looks: it is refused, or the end is the same bytes."""
    converted(source, tmp_path / "whole", SIZES)
    expected = contents(tmp_path / "whole")
    for kind in ("pipe", "loop", "gone"):
        for number, name in enumerate(("conversion.partial", "conversion-1-of-2.done", "stage-0-tp-0.json")):
            out = tmp_path / f"{kind}-{number}"
            converted(source, out, SIZES, part=Part(1, 2))
            substitute(out / name, kind)
            try:
                result = converted(source, out, SIZES, part=Part(2, 2))
            except OutputError as error:
                assert str(error).isprintable()
            else:
                assert result.missing == (1,) or contents(out) == expected, (kind, name)
