"""A rank that dies, is stopped, hangs or makes a nan under torchrun stops all of them, and is named."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.conftest import MakeCheckpoint
from tests.tools import tamper
from tests.tools.sharded import convert_tiny
from tests.whole.test_torchrun import Launched, torchrun

PLANS = {2: {"tp": 2}, 4: {"tp": 2, "pp": 2}}
slow = pytest.mark.slow
WORLDS = [2, pytest.param(4, marks=slow)]


@pytest.fixture
def outputs(tiny: MakeCheckpoint, tmp_path: Path) -> dict[int, Path]:
    for world, plan in PLANS.items():
        convert_tiny(tiny("llama"), tmp_path / str(world), plan)
    return {world: tmp_path / str(world) for world in PLANS}


def assert_refused(ran: Launched, message: str) -> None:
    """One rank said what happened, once, in words; torchrun's own report of its processes is not ours."""
    assert ran.exit_code != 0
    found = json.loads(ran.stdout)["error"]["message"]
    assert re.match(message, found), found
    assert ran.stderr.count("reshard verify-and-run: ") == 1
    assert 'File "' not in ran.stderr.partition("torch/distributed")[0]


@pytest.mark.parametrize("world", WORLDS)
def test_a_killed_rank(world: int, outputs: dict[int, Path]) -> None:
    ran = torchrun(world, outputs[world], ill=("die", 1, 1, "attn.o"))
    where = r"rank 0 waits in layer 1, attn\.o, all_reduce of ranks 0, 1"
    assert_refused(ran, rf"rank 1 died or was stopped: no sign of life for \d+ s, last seen in .*; {where}")


@slow
@pytest.mark.parametrize("world", WORLDS)
def test_a_stopped_rank(world: int, outputs: dict[int, Path]) -> None:
    """SIGSTOP. torchrun kills it after 30 s of its own; the message and the other ranks' end don't wait for that."""
    ran = torchrun(world, outputs[world], ill=("stop", 0, 0, "mlp.down"))
    assert_refused(
        ran, r"rank 0 died or was stopped: no sign of life for 1\d s, last seen in .*rank 1 waits in layer 0"
    )


@slow
@pytest.mark.parametrize("world", WORLDS)
def test_a_hanging_rank(world: int, outputs: dict[int, Path]) -> None:
    ran = torchrun(world, outputs[world], "--timeout", 5, ill=("hang", 1, 1, "attn.o"))
    assert_refused(ran, r"rank 1: layer 1, attn\.o: no step for \d+ s, more than the 5 s allowed by --timeout")


@slow
def test_a_slow_rank_is_waited_for(outputs: dict[int, Path]) -> None:
    """Longer than a dead one would be: it gives signs of life."""
    ran = torchrun(2, outputs[2], ill=("slow", 1, 1, "attn.o"))
    assert ran.exit_code == 0, ran.stderr
    assert json.loads(ran.stdout)["passed"] is True


@slow
@pytest.mark.parametrize("world", WORLDS)
def test_a_nan_of_one_rank(world: int, outputs: dict[int, Path]) -> None:
    file, rank = ("stage-0-tp-1.safetensors", 1) if world == 2 else ("stage-1-tp-1.safetensors", 3)
    tamper.change(outputs[world], file, "layers.2.mlp.down", tamper.not_a_number)
    ran = torchrun(world, outputs[world])
    assert ran.exit_code == 1
    found = json.loads(ran.stdout)  # of the rank that made it, alone
    assert {check["name"] for check in found["checks"] if not check["passed"]} == {"finite"}
    assert found["checks"][0]["where"].startswith(f"rank {rank}: layer 2, mlp.down: ")
    assert "reshard verify-and-run: " not in ran.stderr
