"""Power loss: from whatever state the disk is left in, the same command ends with the same bytes."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from converter.check import check
from converter.output.partial import sync_all
from converter.output.parts import Part
from tests.conftest import MakeCheckpoint
from tests.tools import crash, power
from tests.tools.converted import contents, converted

NAME, SIZES = "llama_odd", {"tp": 3}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    crash.many_units(monkeypatch)


def states_of(folder: Path, place: Path, dice: random.Random, chance: float = 0.25) -> list[dict[str, bytes]]:
    """States that a loss of power at various moments of a conversion may leave."""
    place.mkdir()
    states: list[dict[str, bytes]] = []

    def moment(disk: power.Disk) -> None:
        if dice.random() < chance:
            states.append(disk.after_loss(dice))

    with pytest.MonkeyPatch.context() as patch:
        for _ in power.recorded(place, patch, moment):
            converted(folder, place / "out", SIZES, workers=1)
    assert len(states) > 20
    return states


def make_state(folder: Path, state: dict[str, bytes]) -> Path:
    """Lay the files of a state down; returns the output folder."""
    for name, data in state.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder / "out"


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_power_loss(tiny: MakeCheckpoint, tmp_path: Path, seed: int) -> None:
    folder = tiny(NAME)
    converted(folder, tmp_path / "undisturbed", SIZES)
    expected = contents(tmp_path / "undisturbed")
    states = states_of(folder, tmp_path / "here", random.Random(seed))
    kept = 0
    for number, state in enumerate(states):
        out = make_state(tmp_path / str(number), state)
        if (out / "manifest.json").exists():
            assert check(out, folder).failures == ()
        kept += converted(folder, out, SIZES).bytes_kept > 0
        assert contents(out) == expected
        shutil.rmtree(tmp_path / str(number), ignore_errors=True)
    assert kept > len(states) // 4


def test_without_syncing_the_loss_is_seen(
    tiny: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: shard files get their names before their bytes are safe."""

    def careless(paths: Sequence[Path]) -> None:
        sync_all([path for path in paths if ".safetensors" not in path.name])

    monkeypatch.setattr("converter.output.partial.sync_all", careless)
    monkeypatch.setattr("converter.forward.move.sync_all", careless)
    right = []
    for seed in range(3):
        for number, state in enumerate(states_of(tiny(NAME), tmp_path / f"here-{seed}", random.Random(seed), 1.0)):
            if "out/manifest.json" in state and state["out/manifest.json"].strip(b"\0"):
                out = make_state(tmp_path / f"{seed}-{number}", state)
                right.append(check(out).passed)
    assert False in right


def test_what_a_finished_part_says_stays_said(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    """Whenever the power goes after a part is done, its record, the manifest and the sums are there, whole."""
    out = tmp_path / "here" / "out"
    out.parent.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        for disk in power.recorded(out.parent, patch, lambda _: None):
            for part, names in (
                (Part(1, 2), {"conversion-1-of-2.done"}),
                (Part(2, 2), {"manifest.json", "SHA256SUMS"}),
            ):
                converted(tiny(NAME), out, SIZES, workers=1, part=part, sha256=True)
                for name in names:
                    inode = disk.names[f"out/{name}"]
                    assert inode == (out / name).stat().st_ino
                    assert disk.safe[inode] == (out / name).read_bytes()
