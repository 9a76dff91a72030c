"""Parts of one conversion in a shared folder: disjoint, in any order, at once, interrupted; the last one publishes."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

from converter.check import check
from converter.forward.dealing import deal
from converter.forward.shard_file import lay_out
from converter.output.parts import Part, parse_part, part_from_environment
from shard_plans.errors import ManifestError, OutputError, PlanError
from shard_plans.placement.place import place
from tests.conftest import MakeCheckpoint
from tests.tools import crash
from tests.tools.cli import RunCli
from tests.tools.converted import bound, contents, converted
from tests.tools.plans import make_plan

NAME, SIZES = "deepseek_v3_mtp", {"pp": 2, "dp": 2, "tp": 2, "ep": 4}


@pytest.fixture(scope="module")
def expected(tiny: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("whole") / "out"
    converted(tiny(NAME), out, SIZES)
    return contents(out)


@pytest.mark.parametrize("count", [2, 4, 7, 20])
def test_parts_make_what_one_process_makes(
    tiny: MakeCheckpoint, tmp_path: Path, expected: dict[str, bytes], count: int
) -> None:
    order = list(range(1, count + 1))
    random.Random(count).shuffle(order)
    read = 0
    for done, number in enumerate(order, 1):
        with pytest.raises(ManifestError, match="isn't finished"):
            check(tmp_path)
        result = converted(tiny(NAME), tmp_path, SIZES, part=Part(number, count))
        assert result.missing == tuple(sorted(order[done:]))
        assert result.part == f"{number}/{count}"
        read += result.bytes_written
    assert contents(tmp_path) == expected
    assert check(tmp_path, tiny(NAME)).passed
    assert converted(tiny(NAME), tmp_path, SIZES, part=Part(1, count)).bytes_written == 0


@pytest.mark.parametrize("count", [1, 2, 3, 5, 12, 40])
def test_every_file_is_in_one_part(tiny: MakeCheckpoint, count: int) -> None:
    binding = bound(tiny(NAME))
    plan = make_plan(binding, SIZES)
    layouts = [lay_out(file, "0" * 32, "0" * 32) for file in place(binding, plan).files]
    parts = deal(layouts, count)
    assert len(parts) == count
    assert [layout for part in parts for layout in part] == layouts
    if count == 2:
        assert [{layout.file.place["stage"] for layout in part} for part in parts] == [{0}, {1}]


def test_a_missing_part_is_named(tiny: MakeCheckpoint, tmp_path: Path, run_cli: RunCli) -> None:
    sizes = ("--pp", 2, "--dp", 2, "--tp", 2, "--ep", 4)
    said = run_cli("convert", tiny(NAME), tmp_path / "out", *sizes, "--part", "2/5").stdout
    assert said.startswith("part 2/5 is made; missing: parts 1,3-5\n")
    message = run_cli("check", tmp_path / "out", code=2).stderr
    assert "parts 1,3-5 of 5 are missing" in message
    for number in (1, 3, 4):
        run_cli("convert", tiny(NAME), tmp_path / "out", *sizes, "--part", f"{number}/5")
    done = run_cli("convert", tiny(NAME), tmp_path / "out", *sizes, "--part", "5/5", "--json").json
    assert (done["part"], done["missing"]) == ("5/5", [])
    run_cli("check", tmp_path / "out")


def test_parts_at_once(tiny: MakeCheckpoint, tmp_path: Path, expected: dict[str, bytes]) -> None:
    children = [crash.start(lambda n=number: make(tiny(NAME), tmp_path, n)) for number in range(1, 5)]  # type: ignore[misc]
    assert [crash.wait(child) for child in children] == [0, 0, 0, 0]
    if not (tmp_path / "manifest.json").exists():  # the last two saw each other at work
        converted(tiny(NAME), tmp_path, SIZES, part=Part(1, 4))
    assert contents(tmp_path) == expected


def make(folder: Path, out: Path, number: int, kill_at: int = -1) -> None:
    """One of four parts; killed at a call, where one is given."""
    crash.at_call(crash.CALLS, kill_at, crash.die)
    converted(folder, out, SIZES, part=Part(number, 4))


def test_parts_that_are_killed(tiny: MakeCheckpoint, tmp_path: Path, expected: dict[str, bytes]) -> None:
    dice = random.Random(3)
    for round_number in range(4):
        out = tmp_path / str(round_number)
        killed = 0
        for number in dice.sample(range(1, 5), 4):
            for _ in range(2):
                at = dice.randint(5, 120)
                code = crash.forked(lambda n=number, a=at, o=out: make(tiny(NAME), o, n, a))  # type: ignore[misc]
                assert code in (0, -signal.SIGKILL)
                killed += code != 0
        assert killed > 2
        for number in range(1, 5):
            converted(tiny(NAME), out, SIZES, part=Part(number, 4))
        assert contents(out) == expected


def test_a_fresh_part_is_made_again(tiny: MakeCheckpoint, tmp_path: Path, expected: dict[str, bytes]) -> None:
    assert converted(tiny(NAME), tmp_path, SIZES, part=Part(1, 2)).bytes_written > 0
    assert converted(tiny(NAME), tmp_path, SIZES, part=Part(1, 2)).bytes_written == 0
    assert converted(tiny(NAME), tmp_path, SIZES, part=Part(1, 2), fresh=True).bytes_written > 0
    converted(tiny(NAME), tmp_path, SIZES, part=Part(2, 2))
    assert contents(tmp_path) == expected


def test_a_part_that_lost_a_file_is_named(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    converted(tiny(NAME), tmp_path, SIZES, part=Part(1, 2))
    (tmp_path / "stage-0-tp-0.safetensors").unlink()
    with pytest.raises(OutputError, match=r"stage-0-tp-0.safetensors isn't there .* make part 1 with --fresh"):
        converted(tiny(NAME), tmp_path, SIZES, part=Part(2, 2))
    assert not (tmp_path / "manifest.json").exists()
    converted(tiny(NAME), tmp_path, SIZES, part=Part(1, 2), fresh=True)
    assert check(tmp_path, tiny(NAME)).passed


def test_another_number_of_parts_is_refused(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    converted(tiny(NAME), tmp_path, SIZES, part=Part(1, 2))
    for part in (Part(2, 3), Part()):
        with pytest.raises(OutputError, match=r"unfinished conversion by .* in 2 parts, not by"):
            converted(tiny(NAME), tmp_path, SIZES, part=part)


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "1/0", "-1/2", "1/2/3"])
def test_a_part_that_there_is_not_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="isn't I/N"):
        parse_part(text)


def test_the_environment_says_which_part() -> None:
    assert parse_part("2/8") == Part(2, 8)
    torch = {"RANK": "3", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "x"}
    assert part_from_environment(torch) == (Part(4, 8), "torchrun")
    slurm = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0"}
    assert part_from_environment(slurm) == (Part(1, 2), "srun")
    for without in (
        {}, {"RANK": "0", "WORLD_SIZE": "8"}, torch | {"WORLD_SIZE": "1", "RANK": "0"}, torch | {"RANK": "9"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}, {"SLURM_ARRAY_TASK_ID": "3"},
    ):  # fmt: skip
        assert part_from_environment(without) is None
