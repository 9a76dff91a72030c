"""One rank a process under torchrun with gloo computes what virtual ranks compute, and reports once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.conftest import MakeCheckpoint
from tests.tools import tamper
from tests.tools.cli import RunCli
from tests.tools.plans import plan_id
from tests.tools.sharded import convert_tiny, relative

LIMIT = 1e-6
ROOT = Path(__file__).parents[2]
CELLS = [
    ("qwen2", {"tp": 2}),
    ("mixtral", {"pp": 2}),
    ("deepseek_v3_fp8", {"dp": 2, "ep": 2}),
    pytest.param("qwen3_next", {"tp": 2, "ep": 2}, marks=pytest.mark.slow),
    pytest.param("qwen3_next", {"pp": 2, "dp": 2, "ep": 2}, marks=pytest.mark.slow),
    pytest.param("qwen2", {"tp": 2, "pp": 2}, marks=pytest.mark.slow),
    pytest.param("mixtral", {"tp": 4, "ep": 2, "etp": 2}, marks=pytest.mark.slow),
    pytest.param("deepseek_v3_fp8", {"tp": 2, "dp": 2, "ep": 4}, marks=pytest.mark.slow),
]


@dataclass(frozen=True, slots=True)
class Launched:
    """What torchrun left behind."""

    exit_code: int
    stdout: str
    stderr: str


def torchrun(processes: int, *arguments: object, ill: Sequence[object] = ()) -> Launched:
    """`torchrun -m reshard verify-and-run ARGUMENTS --json`, with one thread a process.

    `ill`: how which rank falls ill at which layer and operator (tests/tools/ailing.py).
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += ["-m", *(["tests.tools.ailing", *map(str, ill)] if ill else ["reshard"])]
    command += ["verify-and-run", *map(str, arguments), "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)
    return Launched(ran.returncode, ran.stdout, ran.stderr)


def name_cell(value: object) -> str:
    return plan_id(value) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize(("name", "sizes"), CELLS, ids=name_cell)
def test_equals_virtual_ranks(
    name: str, sizes: dict[str, int], tiny: MakeCheckpoint, run_cli: RunCli, tmp_path: Path
) -> None:
    source, out = tiny(name), tmp_path / "out"
    convert_tiny(source, out, sizes)
    world = sizes.get("tp", 1) * sizes.get("dp", 1) * sizes.get("pp", 1)
    here, there = tmp_path / "here.safetensors", tmp_path / "there.safetensors"
    options = ("--reference", source, "--input-ids", source / "reference.safetensors", "--max-new-tokens", 6,
               "--prefill-chunk", 5, "--kv-block", 4)  # fmt: skip
    virtual = run_cli("verify-and-run", out, *options, "--logits-out", here, "--json").json
    ran = torchrun(world, out, *options, "--logits-out", there)
    assert ran.exit_code == 0, ran.stderr
    found: Any = json.loads(ran.stdout)  # one document: rank 0 alone reports
    assert found["passed"] is True
    assert [check["name"] for check in found["checks"]] == [check["name"] for check in virtual["checks"]]
    assert found["generated"] == virtual["generated"]
    assert found["bytes_read"] >= virtual["bytes_read"]
    assert relative(load_file(there)["logits"], load_file(here)["logits"]) < LIMIT


def test_a_failed_check_fails_every_process(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    source, out = tiny("llama"), tmp_path / "out"
    convert_tiny(source, out, {"tp": 2})
    tamper.swap_halves(out, "stage-0-tp-1.safetensors", "layers.1.mlp.gate_up")
    ran = torchrun(2, out, "--reference", source)
    assert ran.exit_code == 1
    found = json.loads(ran.stdout)
    failed = {check["name"]: check["where"] for check in found["checks"] if not check["passed"]}
    assert {"bytes", "layers", "hidden", "logits"} <= set(failed)
    assert "layer 1" in failed["layers"]


@pytest.mark.slow
def test_a_damaged_file_of_another_rank_is_reported(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert_tiny(tiny("llama"), out, {"tp": 2})
    tamper.truncate(out / "stage-0-tp-1.safetensors")
    ran = torchrun(2, out)
    assert ran.exit_code == 1
    found = json.loads(ran.stdout)
    assert [check["name"] for check in found["checks"] if not check["passed"]] == ["hashes"]
    assert "rank 1: " in found["checks"][0]["where"]
    assert "stage-0-tp-1.safetensors" in found["checks"][0]["where"]


@pytest.mark.slow
def test_a_bit_that_one_rank_finds_flipped(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    out, file = tmp_path / "out", "stage-0-tp-1.safetensors"
    convert_tiny(tiny("llama"), out, {"tp": 2})
    tamper.flip(out / file, tamper.tensor_offset(out, file, "layers.2.attn.o")[0])
    ran = torchrun(2, out)
    assert ran.exit_code == 1
    assert f"{file}, tensor layers.2.attn.o" in ran.stdout


def test_the_wrong_number_of_processes_is_refused(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert_tiny(tiny("llama"), out, {"tp": 4})
    ran = torchrun(2, out)
    assert ran.exit_code != 0
    assert "2 processes, the plan has 4 ranks" in ran.stderr
