"""Outputs of some ranks alone: what is read, written, checked, and refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from converter.check import check
from converter.restore import restore
from runtime.opened import open_output
from shard_plans.documents.manifest import read_manifest
from shard_plans.errors import ManifestError, OutputError, PlanError, RuntimeFault
from tests.conftest import MakeCheckpoint
from tests.tools import tamper
from tests.tools.cli import RunCli
from tests.tools.converted import bound, contents, converted
from tests.tools.spoiled import only

NAME, SIZES = "deepseek_v3_mtp", {"pp": 2, "dp": 2, "tp": 2, "ep": 4}


@pytest.fixture(scope="module")
def whole(tiny: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "out"
    converted(tiny(NAME), out, SIZES)
    return out


@pytest.mark.parametrize("ranks", [(0,), (5, 6), (4, 5, 6, 7)])
def test_their_files_are_those_of_the_whole(
    tiny: MakeCheckpoint, tmp_path: Path, whole: Path, ranks: tuple[int, ...]
) -> None:
    result = converted(tiny(NAME), tmp_path / "out", SIZES, ranks=ranks)
    root = read_manifest(tmp_path / "out")
    assert [entry.at.rank for entry in root.ranks] == list(ranks)
    assert root.partial == ranks
    assert {file.name for file in root.files} == {name for entry in root.ranks for name in entry.files}
    here, there = contents(tmp_path / "out"), contents(whole)
    assert all(there[name] == data for name, data in here.items() if name != "manifest.json")
    assert {name for name in here if name.startswith("stage-")} == {
        name for file in root.files for name in (file.name, file.manifest)
    }
    assert result.ranks == len(ranks)
    assert result.bytes_read < bound(tiny(NAME)).checkpoint.total_bytes


def test_check_says_what_it_could_not_look_at(tiny: MakeCheckpoint, tmp_path: Path, run_cli: RunCli) -> None:
    converted(tiny(NAME), tmp_path / "out", SIZES, ranks=(0, 5))
    for deep in (None, tiny(NAME)):
        result = check(tmp_path / "out", deep)
        assert result.passed, result.failures
        assert result.absent == (1, 2, 3, 4, 6, 7)
    assert "not there, so not checked: ranks 1-4,6-7" in run_cli("check", tmp_path / "out").stdout


def test_a_fault_in_what_is_there_is_found(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    converted(tiny(NAME), tmp_path / "out", SIZES, ranks=(0, 1))
    file, name = tamper.find(tmp_path / "out", "experts.gate_up")[0]
    tamper.swap_halves(tmp_path / "out", file, name)
    assert check(tmp_path / "out").passed
    assert {failure.tensor for failure in check(tmp_path / "out", tiny(NAME)).failures} == {name}


def test_a_rank_that_is_stated_and_not_there_is_found(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    converted(tiny(NAME), tmp_path / "out", SIZES, ranks=(0, 1))
    tamper.seal(tmp_path / "out", lambda root: root.update(partial="0-2"))
    assert "lists 2 ranks, which aren't the 3" in only(check(tmp_path / "out"))[2]
    tamper.seal(tmp_path / "out", lambda root: root.pop("partial"))
    assert "lists 2 ranks, which aren't the 8" in only(check(tmp_path / "out"))[2]


def test_restore_and_a_run_refuse_it(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    converted(tiny(NAME), tmp_path / "out", SIZES, ranks=(0, 1, 2, 3, 4, 5, 6))
    with pytest.raises(ManifestError, match="holds the files of ranks 0-6 alone"):
        restore(tmp_path / "out", tmp_path / "back")
    assert not (tmp_path / "back").exists()
    with pytest.raises(RuntimeFault, match="holds ranks 0-6 of 8 alone"):
        open_output(tmp_path / "out")


def test_other_ranks_are_another_output(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    converted(tiny(NAME), tmp_path / "out", SIZES, ranks=(0,))
    assert converted(tiny(NAME), tmp_path / "out", SIZES, ranks=(0,)).bytes_written == 0
    for ranks in ((1,), None):
        with pytest.raises(OutputError, match=r"holds the output of plan .* for ranks 0, not of"):
            converted(tiny(NAME), tmp_path / "out", SIZES, ranks=ranks)


def test_the_command_takes_a_list(tiny: MakeCheckpoint, tmp_path: Path, run_cli: RunCli) -> None:
    run_cli("convert", tiny("llama"), tmp_path / "out", "--tp", 4, "--ranks", "2-3,2")
    assert read_manifest(tmp_path / "out").partial == (2, 3)
    for wrong, words in (("4", "ranks 4 are asked for, the plan has 0 to 3"), ("a", "isn't a list such as 8-15")):
        assert words in run_cli("convert", tiny("llama"), tmp_path / "no", "--tp", 4, "--ranks", wrong, code=2).stderr


def test_a_rank_of_nothing_is_refused(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="ranks none are asked for"):
        converted(tiny("llama"), tmp_path / "out", ranks=())
