"""SHA256SUMS: what sha256sum itself says, of every file."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from converter.check import check
from tests.conftest import MakeCheckpoint
from tests.tools import tamper
from tests.tools.converted import contents, converted

pytestmark = pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs sha256sum")


def sha256sum(out: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=out, capture_output=True, text=True)


def test_sha256sum_agrees_on_every_file(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    converted(tiny("mixtral_odd"), tmp_path, {"tp": 2, "ep": 2}, sha256=True)
    ran = sha256sum(tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert {line.rpartition(": ")[0] for line in ran.stdout.splitlines()} == {*contents(tmp_path)} - {"SHA256SUMS"}
    assert check(tmp_path, tiny("mixtral_odd")).passed
    tamper.flip(tmp_path / "stage-0-tp-1.safetensors", -1)
    assert sha256sum(tmp_path).returncode != 0


def test_a_finished_output_gets_them_later(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    converted(tiny("llama"), tmp_path)
    before = contents(tmp_path)
    assert converted(tiny("llama"), tmp_path, sha256=True).bytes_written == 0
    assert sha256sum(tmp_path).returncode == 0
    assert {name: data for name, data in contents(tmp_path).items() if name != "SHA256SUMS"} == before
