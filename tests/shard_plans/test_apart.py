"""Files that options name: in the place of files alone, apart from one another, and never of what is read."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest

from shard_plans.apart import check_apart, output_of
from shard_plans.errors import OutputError
from shard_plans.written import write_whole
from tests.conftest import MakeCheckpoint
from tests.tools.cli import RunCli
from tests.tools.refusals import refused


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "report"
    path.write_text("before")
    write_whole(path, "after")
    assert path.read_text() == "after" and os.listdir(tmp_path) == ["report"]


def test_a_link_is_followed_and_kept(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for number, target in enumerate((tmp_path / "there" / "old", tmp_path / "there" / "new")):
        link = tmp_path / f"link-{number}"
        link.symlink_to(target)
        write_whole(link, "text")
        assert link.is_symlink() and target.read_text() == "text"


def test_nothing_but_a_file_is_replaced(tmp_path: Path) -> None:
    fifo, folder, round_ = tmp_path / "fifo", tmp_path / "folder", tmp_path / "round"
    os.mkfifo(fifo)  # as devices are: /dev/null was replaced so by a user who may
    folder.mkdir()
    round_.symlink_to(round_)
    (tmp_path / "link").symlink_to(fifo)
    for path in (fifo, folder, tmp_path / "link", round_, tmp_path / "nowhere" / "file", tmp_path / ("a" * 256)):
        with pytest.raises(OutputError, match="can't be written"):
            write_whole(path, "text")
    assert stat.S_ISFIFO(fifo.stat().st_mode) and folder.is_dir() and not list(tmp_path.glob("*.partial"))


def test_two_options_name_two_files(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    check_apart({"-o": tmp_path / "file", "--html": tmp_path / "other", "--junit": None}, {})
    for second in (tmp_path / "file", tmp_path / "." / "file", tmp_path / "link"):
        with pytest.raises(OutputError, match="-o and --html both name"):
            check_apart({"-o": tmp_path / "file", "--html": second}, {})


def test_what_is_read_is_not_replaced(tmp_path: Path) -> None:
    checkpoint, out = tmp_path / "checkpoint", tmp_path / "out"
    for folder, name in ((checkpoint, "config.json"), (checkpoint, "plan.yaml"), (out, "manifest.json")):
        folder.mkdir(exist_ok=True)
        (folder / name).touch()
    read = {"CHECKPOINT": checkpoint, "--plan": output_of(out / "plan.yaml"), "--family": None}
    for right in (checkpoint / "plan.yaml", checkpoint / "new.json", tmp_path / "plan.yaml"):
        check_apart({"-o": right}, read)
    for wrong in (checkpoint / "config.json", checkpoint, out / "plan.yaml", out / "deeper" / "new.html"):
        with pytest.raises(OutputError, match=r"which is only read|would replace what is read"):
            check_apart({"-o": wrong}, read)
    assert output_of(checkpoint / "plan.yaml") is None


def test_plan_memory_spares_what_it_reads(tiny: MakeCheckpoint, run_cli: RunCli, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(tiny("llama"), checkpoint)
    config = (checkpoint / "config.json").read_bytes()
    common = ("plan-memory", checkpoint, "--cluster", "1x2:80GB")
    for option in ("-o", "--html"):
        refused(run_cli(*common, option, checkpoint / "config.json", code=2), option, "CHECKPOINT")
    assert (checkpoint / "config.json").read_bytes() == config
    refused(run_cli(*common, "-o", tmp_path / "one", "--html", tmp_path / "one", code=2), "both name")
    assert not (tmp_path / "one").exists()
    run_cli(*common, "-o", tmp_path / "one", "--html", tmp_path / "two")
    run_cli("plan-memory", checkpoint, "--plan", tmp_path / "one", "-o", tmp_path / "one")  # its own plan, edited


@pytest.mark.parametrize(
    "words",
    [
        ("check", "OUT", "--deep", ""),
        ("check", ""),
        ("restore", "OUT", ""),
        ("inspect", ""),
        ("adopt", "OUT", "--checkpoint", ""),
        ("convert", "OUT", "OUT2", "--plan", ""),
        ("convert", "OUT", "OUT2", "--family", ""),
        ("plan-memory", "OUT", "--cluster", "1x1:80GB", "-o", ""),
        ("plan-memory", "OUT", "--cluster", "1x1:80GB", "--html", ""),
        ("verify-and-run", "OUT", "--reference", ""),
        ("verify-and-run", "OUT", "--junit", ""),
        ("demo", "-o", ""),
    ],
)
def test_an_empty_path_is_no_path(words: tuple[str, ...], run_cli: RunCli) -> None:
    """An unset variable of a script would otherwise leave out the deep check, the reference or the report unseen."""
    assert "the path is empty" in run_cli(*words, code=2).stderr
