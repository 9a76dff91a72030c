"""Conversions that are killed, again and again, end with the same bytes as an undisturbed one."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest

from converter.check import check
from converter.output.parts import Part
from shard_plans.documents.plan import NATIVE
from tests.conftest import MakeCheckpoint
from tests.tools import crash
from tests.tools.converted import contents, converted
from tests.tools.plans import plan_id

CASES: list[tuple[str, dict[str, int]]] = [
    ("llama_odd", {"tp": 3}), ("deepseek_v3_mtp", {"tp": 4, "ep": 2, "etp": 2}),
    ("mixtral_odd", {"pp": 2, "tp": 2, "ep": 2}), ("qwen3_moe_fp8", {"dp": 2, "ep": 2, "etp": 1}), ("llama_single", {}),
]  # fmt: skip
LAID_OUT: list[tuple[str, dict[str, int], str]] = [
    ("llama4_even", {"tp": 2}, "vllm@0.33"), ("qwen3_next", {"tp": 2, "ep": 2, "pp": 2}, "vllm@0.33"),
    ("deepseek_v3_wide_fp8", {"tp": 2, "ep": 2}, "deepseek-mp"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    crash.many_units(monkeypatch)


def kill_again_and_again(
    folder: Path, tmp_path: Path, sizes: dict[str, int], kills: int, seed: int, layout: str = NATIVE
) -> None:
    """Kill at random calls; each conversion goes on with what the last one left, and the end is the same bytes."""
    dice = random.Random(seed)
    total = crash.calls(folder, tmp_path / "undisturbed", sizes, layout=layout)
    expected = contents(tmp_path / "undisturbed")
    done = round_number = 0
    while done < kills:
        out = tmp_path / str(round_number)
        for _ in range(dice.randint(1, 3)):
            done += crash.killed(folder, out, sizes, dice.randint(2, total), dice.choice([1, 2, 8]), layout)
            if (out / "manifest.json").exists():
                assert check(out, folder).failures == ()
        converted(folder, out, sizes, workers=dice.choice([1, 2, 8]), layout=layout)
        assert contents(out) == expected
        round_number += 1


@pytest.mark.parametrize(("name", "sizes"), CASES, ids=lambda v: plan_id(v) if isinstance(v, dict) else v)
def test_kills(tiny: MakeCheckpoint, tmp_path: Path, name: str, sizes: dict[str, int]) -> None:
    kill_again_and_again(tiny(name), tmp_path, sizes, 6, 1)


@pytest.mark.parametrize(("name", "sizes", "layout"), LAID_OUT)
def test_workers_and_parts_change_nothing_in_other_layouts(
    tiny: MakeCheckpoint, tmp_path: Path, name: str, sizes: dict[str, int], layout: str
) -> None:
    for workers in (1, 2, 8):
        converted(tiny(name), tmp_path / str(workers), sizes, workers=workers, layout=layout)
    for number in (2, 1):
        converted(tiny(name), tmp_path / "parts", sizes, layout=layout, part=Part(number, 2))
    expected = contents(tmp_path / "1")
    assert all(contents(tmp_path / other) == expected for other in ("2", "8", "parts"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "sizes", "layout"), LAID_OUT)
def test_kills_in_other_layouts(
    tiny: MakeCheckpoint, tmp_path: Path, name: str, sizes: dict[str, int], layout: str, seed: int
) -> None:
    kill_again_and_again(tiny(name), tmp_path, sizes, 5, seed, layout)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("name", "sizes"), CASES, ids=lambda v: plan_id(v) if isinstance(v, dict) else v)
def test_many_kills(tiny: MakeCheckpoint, tmp_path: Path, name: str, sizes: dict[str, int], seed: int) -> None:
    kill_again_and_again(tiny(name), tmp_path, sizes, 5, 100 + seed)


@pytest.mark.slow
def test_kills_by_the_clock(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    dice = random.Random(5)
    folder, sizes = tiny("deepseek_v3_mtp"), {"tp": 4, "ep": 2}
    converted(folder, tmp_path / "undisturbed", sizes)
    for number in range(20):
        out = tmp_path / str(number)
        crash.forked(partial(converted, folder, out, sizes), kill_after=dice.uniform(0, 0.5))
        converted(folder, out, sizes)
        assert contents(out) == contents(tmp_path / "undisturbed")
