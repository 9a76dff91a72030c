"""What a run will take is told before anything is loaded, and holds against what it took."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from converter.verbs import convert
from runtime.budget import Load, budget
from runtime.kv_options import KvOptions
from runtime.loaders import tower_bytes
from runtime.loading.batches import Batches
from runtime.loading.loader import Loader, LoadOptions
from runtime.opened import open_output
from runtime.request import RunOptions
from runtime.run import verify_and_run
from shard_plans.errors import RuntimeFault
from tests.bench.checkpoint import make_deepseek
from tests.conftest import MakeCheckpoint
from tests.runtime.test_tower_steps import seen
from tests.runtime.test_towers import GRIDS, pixels
from tests.tools.sharded import CPU, convert_tiny

PLANS: tuple[dict[str, int], ...] = ({}, {"tp": 2, "pp": 2}, {"tp": 4, "ep": 4}, {"dp": 2, "ep": 2})

SPARE = 1 << 30
"""Bytes by which a prediction may be too high: the largest matrix seldom meets the largest layer."""


def ran(out: Path, *words: object) -> dict[str, Any]:
    """The command in a process of its own, whose memory nothing else has used."""
    command = [sys.executable, "-m", "reshard", "verify-and-run", *map(str, (out, *words)), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("sizes", [{}, {"tp": 2, "pp": 3}], ids=str)
def test_weights_are_those_that_are_in_memory_at_a_time(
    sizes: dict[str, int], tiny: MakeCheckpoint, tmp_path: Path
) -> None:
    convert_tiny(tiny("mixtral"), tmp_path / "out", sizes)
    memory, peaks = [], []
    for resident in (1, 2, 5):
        result = verify_and_run(RunOptions(tmp_path / "out", resident_layers=resident))
        memory.append(result.figures["memory"]["predicted"]["weights"])
        peaks.append(max(span.resident for span in result.timeline))
        opened = open_output(tmp_path / "out")
        options = LoadOptions(CPU, resident=resident)
        with Loader(opened.out, opened.root, range(opened.plan.grid.world), 3, options) as loader:
            assert memory[-1] == loader.reserved >= loader.peak
    assert memory == sorted(memory) and memory[0] < memory[-1]
    assert all(peak <= held for peak, held in zip(peaks, memory, strict=True))


def test_a_cache_is_counted_as_it_is_made(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    for family in ("llama", "deepseek_v3"):
        convert_tiny(tiny(family), tmp_path / family, {})
        found = verify_and_run(RunOptions(tmp_path / family, max_new_tokens=9)).figures
        counted = found["memory"]["predicted"]["kv_cache"]
        assert counted * 0.5 < found["kv_cache_bytes"] <= 1.05 * counted  # tables and positions lie beside


def test_more_than_there_is_is_refused_before_anything_is_read(
    tiny: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert_tiny(tiny("llama"), tmp_path / "out", {})
    read: list[Batches] = []
    monkeypatch.setattr("runtime.loading.loader.Batches", lambda *words: read.append(words))
    monkeypatch.setattr("runtime.budget.free_bytes", lambda device: 1_000_000)
    with pytest.raises(
        RuntimeFault, match=r"takes \d{8,} bytes of memory, .* cpu has 1000000 left .*--resident-layers"
    ):
        verify_and_run(RunOptions(tmp_path / "out"))
    assert not read


def test_a_cache_that_is_larger_than_it_need_be_is_counted_too(
    tiny: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert_tiny(tiny("llama"), tmp_path / "out", {})
    monkeypatch.setattr("runtime.budget.free_bytes", lambda device: 600_000_000)
    assert verify_and_run(RunOptions(tmp_path / "out", max_new_tokens=2, cache=KvOptions(blocks=8))).passed
    with pytest.raises(RuntimeFault, match=r"takes \d{10,} bytes of memory"):
        verify_and_run(RunOptions(tmp_path / "out", max_new_tokens=2, cache=KvOptions(blocks=1 << 18)))


def test_every_part_grows_with_what_it_counts(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    convert_tiny(tiny("deepseek_v3_fp8"), tmp_path / "out", {"tp": 2, "pp": 2})
    opened = open_output(tmp_path / "out")

    def of(
        tokens: int = 16, answers: Sequence[int] = (), matrix: int = 1000, reference: bool = False
    ) -> dict[str, int]:
        load = Load(tokens, tuple(answers), 4, "fp32", 16)
        return budget(opened, range(4), load, torch.device("cpu"), 5, matrix, (7, 9) if reference else None).as_dict()

    few = of()
    assert few["weights"] == 5 and few["kv_cache"] == few["reference"] == 0
    assert of(tokens=32)["activations"] > few["activations"]
    assert of(tokens=32)["communication"] > few["communication"]
    assert of(answers=[40])["kv_cache"] == 3 * of(answers=[16])["kv_cache"] > 0
    assert of(matrix=2000)["matrices"] == 2 * few["matrices"]
    assert of(reference=True)["reference"] == 14
    assert few["total"] == sum(few.values()) - few["total"]


@pytest.mark.parametrize("name", GRIDS)
def test_what_is_kept_of_images_is_counted(name: str, tiny: MakeCheckpoint, tmp_path: Path) -> None:
    convert_tiny(tiny(name), tmp_path / "out", {"tp": 2, "pp": 2})
    opened, patches = open_output(tmp_path / "out"), len(pixels(name))
    with Loader(opened.out, opened.root, range(2), 0, LoadOptions(CPU, tower=True)) as loader:
        assert tower_bytes(opened, range(4)) == loader.reserved > 0
    assert tower_bytes(opened, [2, 3]) == 0

    def of(reference: tuple[int, int] | None, patches: int = patches, tower: int = 0) -> int:
        load = Load(16, (), 4, "fp32", 16, patches)
        return budget(opened, range(4), load, torch.device("cpu"), 5, 1000, reference, tower).images

    steps = seen(tiny(name), name, torch.float32)[3]
    made = sum(step.nbytes for step in steps.values())
    assert 0.7 * (of((7, 9)) - of(None)) <= made <= of((7, 9)) - of(None)
    assert of(None) > 0 == of((7, 9), patches=0)
    assert of(None, tower=11) == of(None) + 11


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of which a layer is 0.4 GB, in FP8."""
    source = tmp_path_factory.mktemp("large") / "checkpoint"
    make_deepseek(source, 1.0)
    return source


@pytest.mark.slow
@pytest.mark.parametrize("sizes", PLANS, ids=str)
def test_predicted_holds_against_measured(sizes: dict[str, int], large: Path, tmp_path: Path) -> None:
    """Of a process that runs all ranks; the negative control is what is predicted without the reference."""
    convert(large, tmp_path / "out", **sizes)  # type: ignore[arg-type]
    found = {n: ran(tmp_path / "out", "--resident-layers", n)["memory"] for n in (1, 3)}
    found[0] = ran(tmp_path / "out", "--reference", large, "--resident-layers", 3)["memory"]
    for memory in found.values():
        assert memory["measured"] <= memory["predicted"]["total"] <= memory["measured"] + SPARE
    assert found[0]["measured"] > found[3]["predicted"]["total"]
