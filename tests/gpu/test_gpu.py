"""The script of this folder on the accelerator, where there is one; on the CPU a glance at each part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runtime.comm.devices import available
from tests.checkpoints.variants import MAIN
from tests.gpu.__main__ import main
from tests.gpu.families import cells
from tests.gpu.part import Part
from tests.gpu.table import table
from tests.whole.test_families import RUN

HERE = available()[0]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(HERE == "cpu", reason="this machine has no accelerator that torch can use")
def test_everything_on_the_device(checkpoints: Path, tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    assert main(["--device", HERE, "--checkpoints", str(checkpoints), "--json", str(found)]) == 0, found.read_text()


@pytest.mark.slow
def test_the_script_itself_on_a_cpu(checkpoints: Path, tmp_path: Path) -> None:
    """One cell of each part, and a checkpoint that isn't large."""
    found = tmp_path / "found.json"
    options = ["--device", "cpu", "--seconds", "0", "--gigabytes", "0.05", "--json", str(found)]
    assert main([*options, "--checkpoints", str(checkpoints)]) == 0, found.read_text()
    parts = {part["name"]: part for part in json.loads(found.read_text())["parts"]}
    assert set(parts) == {"families", "mutations", "processes", "trained model", "loading"}
    assert all(part["done"] or part["skipped"] for part in parts.values())


def test_every_family_comes_before_one_comes_again() -> None:
    kinds = [(cell.name, cell.image) for cell in cells(0)]
    first = len(set(kinds))
    assert {name for name, _ in kinds} >= {*MAIN, *RUN} and len(set(kinds[:first])) == first
    assert cells(0) == cells(0) != cells(1)


def test_a_failure_is_in_the_table() -> None:
    part = Part("families", 9, 2, ["qwen2 tp2: logits 1.0e+00"], figures={"logits": 1.0, "hidden": {"a": 2}})
    found = table("a card", "2.13", [part, Part("trained model", 3, skipped="no model")])
    assert "| families | 2 of 9 | 1 | 0.0 | logits 1; hidden a 2 |" in found and "- families: qwen2 tp2" in found
    assert "| trained model | 0 of 3 | skipped | 0.0 | no model |" in found and not part.passed
