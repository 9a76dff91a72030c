"""verify_and_run as a function and as a command: paths as text, ids as a list, progress, and what is only read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import reshard
from shard_plans.console import Advance
from shard_plans.errors import OutputError
from tests.conftest import MakeCheckpoint
from tests.tools.cli import RunCli
from tests.tools.sharded import convert_tiny


@pytest.fixture
def output(tiny: MakeCheckpoint, tmp_path: Path) -> Path:
    convert_tiny(tiny("llama"), tmp_path / "out", {"tp": 2, "pp": 3})
    return tmp_path / "out"


def test_paths_are_text_and_ids_a_list(output: Path, tiny: MakeCheckpoint) -> None:
    result = reshard.verify_and_run(str(output), str(tiny("llama")), input_ids=[5, 6, 7], max_new_tokens=2)
    assert result.passed and len(result.generated) == 2
    assert result.as_dict()["input_ids"] == [5, 6, 7]


def test_progress_counts_bytes_and_layers(output: Path, tiny: MakeCheckpoint) -> None:
    told: dict[str, list[tuple[int, int]]] = {}

    @contextmanager
    def show(what: str, unit: str) -> Iterator[Advance]:
        steps = told.setdefault(unit, [])
        yield lambda done, total: steps.append((done, total))

    reshard.verify_and_run(output, tiny("llama"), progress=show)
    assert told["layers"] == [(1, 3), (2, 3), (3, 3)]
    assert told["bytes"] and told["bytes"][-1][0] == told["bytes"][-1][1]


def test_the_output_is_only_read(output: Path) -> None:
    shard = output / "stage-0-tp-0.safetensors"
    before = shard.read_bytes()
    with pytest.raises(OutputError, match="which is only read"):
        reshard.verify_and_run(output, logits_out=shard)
    assert shard.read_bytes() == before


def test_the_side_of_a_limit_is_said(output: Path, tiny: MakeCheckpoint, run_cli: RunCli) -> None:
    sides = {}
    for compute in ("float32", "bfloat16"):
        arguments = ("verify-and-run", output, "--reference", tiny("llama"), "--compute", compute, "--json")
        for check in run_cli(*arguments, code=None).json["checks"]:
            sides[compute, check["name"]] = check["bound"]
    assert sides["float32", "logits"] == "most" and sides["bfloat16", "logits"] == "least"


def test_an_output_of_some_ranks_alone_is_not_run(tiny: MakeCheckpoint, tmp_path: Path, run_cli: RunCli) -> None:
    run_cli("convert", tiny("llama"), tmp_path / "out", "--tp", 2, "--pp", 3, "--ranks", "2-3")
    ran = run_cli("verify-and-run", tmp_path / "out", code=2)
    assert "holds ranks 2-3 of 6 alone" in ran.stderr


def test_an_output_is_no_reference(output: Path, run_cli: RunCli) -> None:
    ran = run_cli("verify-and-run", output, "--reference", output, code=2)
    assert "is an output of reshard, in shards; give the checkpoint" in ran.stderr


def test_a_backend_is_for_the_processes_of_torchrun(output: Path, run_cli: RunCli) -> None:
    ran = run_cli("verify-and-run", output, "--backend", "bogus", code=2)
    assert "--backend bogus is for the processes of torchrun" in ran.stderr
