"""Bad sizes, plans and folders through the command: exit code 2, one sentence, nothing half-written taken for whole."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
import yaml

from tests.conftest import MakeCheckpoint
from tests.tools.cli import RunCli
from tests.tools.refusals import nothing_whole, refused


@pytest.mark.parametrize(
    ("name", "sizes", "words"),
    [
        ("llama", ("--tp", 3), ("tp", "8", "3", "1, 2, 4, 8")),
        ("llama", ("--tp", 0), ("tp", "0")),
        ("llama", ("--ep", 2), ("ep",)),
        ("llama", ("--pp", 4), ("pp", "4", "3")),
        ("qwen3_moe", ("--tp", 2, "--ep", 3), ("ep 3", "1, 2")),
        ("qwen3_moe", ("--tp", 4, "--ep", 2, "--etp", 3), ("etp 3", "1, 2")),
        ("mixtral", ("--dp", 16, "--ep", 16), ("ep", "16", "8")),
    ],
)
def test_sizes_that_do_not_divide(
    name: str,
    sizes: tuple[str | int, ...],
    words: tuple[str, ...],
    tiny: MakeCheckpoint,
    run_cli: RunCli,
    tmp_path: Path,
) -> None:
    refused(run_cli("convert", tiny(name), tmp_path / "out", *sizes, code=2), *words)
    nothing_whole(tmp_path / "out", run_cli)


@pytest.fixture
def plan(tiny: MakeCheckpoint, run_cli: RunCli, tmp_path: Path) -> Path:
    """A plan of the tiny llama for two cards."""
    path = tmp_path / "plan.yaml"
    run_cli("plan-memory", tiny("llama"), "--cluster", "1x2:80GB", "--tp", 2, "-o", path)
    return path


def test_a_plan_for_another_checkpoint(plan: Path, tiny: MakeCheckpoint, run_cli: RunCli, tmp_path: Path) -> None:
    out = tmp_path / "out"
    refused(run_cli("convert", tiny("llama_bias"), out, "--plan", plan, code=2), "plan", "another checkpoint")
    refused(run_cli("convert", tiny("qwen3"), out, "--plan", plan, code=2), "plan")
    nothing_whole(out, run_cli)


def test_spoilt_plans_name_key_and_line(plan: Path, tiny: MakeCheckpoint, run_cli: RunCli, tmp_path: Path) -> None:
    text, out = plan.read_text(), tmp_path / "out"
    keys = yaml.safe_load(text)
    assert isinstance(keys, dict)
    plan.write_text(text + "surprise: 1\n")
    refused(run_cli("convert", tiny("llama"), out, "--plan", plan, code=2), "surprise", str(text.count("\n") + 1))
    line = next(number for number, line in enumerate(text.splitlines(), 1) if "{tp: 2" in line)
    plan.write_text(text.replace("{tp: 2", "{tp: two"))
    refused(run_cli("convert", tiny("llama"), out, "--plan", plan, code=2), "tp", "two", f"line {line}")
    plan.write_text("{")
    refused(run_cli("convert", tiny("llama"), out, "--plan", plan, code=2), "plan.yaml")
    refused(run_cli("convert", tiny("llama"), out, "--plan", tmp_path / "none.yaml", code=2), "none.yaml")
    nothing_whole(out, run_cli)


def test_unwritable_folders(tiny: MakeCheckpoint, run_cli: RunCli, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("not a folder")
    refused(run_cli("convert", tiny("llama"), file, "--tp", 2, code=2), str(file))
    refused(run_cli("convert", tiny("llama"), file / "out", "--tp", 2, code=2), str(file))
    assert file.read_text() == "not a folder"
    out = tmp_path / "other"
    out.mkdir()
    (out / "thesis.txt").write_text("keep me")
    refused(run_cli("convert", tiny("llama"), out, "--tp", 2, code=2), "thesis.txt")
    assert [path.name for path in out.iterdir()] == ["thesis.txt"]
    if os.geteuid():  # root may write everywhere
        closed = tmp_path / "closed"
        closed.mkdir(mode=0o500)
        refused(run_cli("convert", tiny("llama"), closed / "out", "--tp", 2, code=2), str(closed))


def test_output_of_something_else_is_kept(tiny: MakeCheckpoint, run_cli: RunCli, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_cli("convert", tiny("llama"), out, "--tp", 2)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    refused(run_cli("convert", tiny("llama"), out, "--tp", 4, code=2), "plan")
    refused(run_cli("convert", tiny("qwen3"), out, "--tp", 2, code=2), str(out))
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    assert run_cli("check", out, "--json").json["passed"] is True


def test_no_space(tiny: MakeCheckpoint, run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, wrote = tmp_path / "out", os.pwrite
    full = [0]

    def pwrite(handle: int, data: bytes, offset: int) -> int:
        full[0] += len(data)
        if full[0] > 100_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return wrote(handle, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    refused(run_cli("convert", tiny("llama"), out, "--tp", 2, code=2), str(out), "No space left on device")
    assert full[0] > 100_000  # otherwise the converter writes by another call, and this test tests nothing
    monkeypatch.undo()
    nothing_whole(out, run_cli)
    run_cli("convert", tiny("llama"), out, "--tp", 2)
    assert run_cli("check", out, "--deep", tiny("llama"), "--json").json["passed"] is True


def test_a_disk_that_is_too_small_is_seen_first(
    tiny: MakeCheckpoint, run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    refused(run_cli("convert", tiny("llama"), tmp_path / "out", "--tp", 2, code=2), "1000")
    monkeypatch.undo()
    nothing_whole(tmp_path / "out", run_cli)


def test_usage_faults_are_exit_code_2(tiny: MakeCheckpoint, run_cli: RunCli, tmp_path: Path) -> None:
    for arguments in (
        ("convert", tiny("llama")),
        ("convert", tiny("llama"), tmp_path / "out", "--tp", "many"),
        ("convert", tiny("llama"), tmp_path / "out", "--tp", 2, "--plan", tmp_path / "plan.yaml"),
        ("plan-memory", tiny("llama"), "--cluster", "two cards"),
        ("plan-memory", tiny("llama"), "--cluster", "1x2:zx81"),
        ("transmogrify",),
    ):
        ran = run_cli(*arguments, code=2)
        assert ran.stderr
        assert "Traceback" not in ran.stderr
