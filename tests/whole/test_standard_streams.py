"""Standard streams that are closed, full, or that nobody reads: no traceback, and 1 means a failed check alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import MakeCheckpoint
from tests.tools.cli import RunCli

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def output(tiny: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.tools.sharded import convert_tiny

    out = tmp_path_factory.mktemp("streams") / "out"
    convert_tiny(tiny("llama"), out, {"tp": 2})
    return out


def in_a_shell(words: str) -> tuple[int, str, str]:
    """Exit code of the command, standard output and error; RESHARD stands for the command."""
    line = words.replace("RESHARD", f"{sys.executable} -m reshard")
    found = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line], capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert "Traceback" not in found.stdout + found.stderr, found
    return found.returncode, found.stdout, found.stderr


@pytest.mark.parametrize("json", ["", "--json"])
def test_closed_streams_take_nothing(output: Path, json: str) -> None:
    assert in_a_shell(f"RESHARD check {output} {json} >&-") == (0, "", "")
    code, printed, _ = in_a_shell(f"RESHARD check {output} {json} 2>&-")
    assert code == 0 and "passed" in printed
    assert in_a_shell(f"RESHARD check {output}/nothing {json} >&- 2>&- <&-") == (2, "", "")


def test_a_closed_stream_takes_no_shard(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    """Whose file would else have the number of standard output, or of standard error."""
    assert in_a_shell(f"RESHARD convert {tiny('llama')} {tmp_path}/out <&- >&- 2>&-")[0] == 0
    assert in_a_shell(f"RESHARD check {tmp_path}/out --deep {tiny('llama')}")[0] == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
@pytest.mark.parametrize("json", ["", "--json"])
def test_a_full_disk_is_no_failed_check(output: Path, json: str) -> None:
    assert in_a_shell("RESHARD --help >/dev/full")[0] == 2
    for verb in ("check", "inspect"):
        code, _, told = in_a_shell(f"RESHARD {verb} {output} {json} >/dev/full")
        assert code == 2 and told.startswith(f"reshard {verb}: ") and len(told.splitlines()) == 1


@pytest.mark.parametrize("json", ["", "--json"])
def test_output_that_nobody_reads_is_no_failed_check(output: Path, json: str) -> None:
    assert in_a_shell(f"RESHARD check {output} {json} | true") == (2, "", "")


def test_what_is_locked_away_is_a_fault_in_json(output: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without rights is a fault of whoever reads it, told under --json too, and no usage error."""
    monkeypatch.setattr("os.access", lambda path, mode, **options: False)
    assert run_cli("check", output, "--json").json["passed"]
