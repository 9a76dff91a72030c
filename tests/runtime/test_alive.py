"""Pulses, signs and what is concluded from them; a rank that hangs, or makes a nan, among virtual ranks."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from converter.faults import SourceChanged
from runtime.alive.lookout import SILENCE, Lookout
from runtime.alive.pulse import Pulse
from runtime.alive.signs import Sign
from runtime.alive.watched import WatchedComm
from runtime.comm.comm import NoComm
from runtime.comm.virtual import VirtualWorld
from runtime.comm.virtual_comm import VirtualComm
from runtime.launch import agree
from runtime.request import RunOptions
from runtime.run import verify_and_run
from shard_plans.errors import CheckpointError, NotFinite, OtherRankStopped, RuntimeFault
from tests.conftest import MakeCheckpoint
from tests.tools import tamper
from tests.tools.ailing import fall_ill
from tests.tools.sharded import checks, convert_tiny, failed


class Clock:
    """Seconds that pass when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        """Its time."""
        return self.now


def test_the_first_operator_that_is_not_finite_is_named() -> None:
    pulse, good = Pulse(), torch.ones(2)
    pulse.enter("layer 3")
    for operator, y in (("attn.qkv", good), ("attn.o", good / 0), ("mlp.down", good * torch.nan)):
        assert pulse.saw(operator, y) is y
    with pytest.raises(NotFinite, match=r"^layer 3, attn\.o: the first result that holds a nan or an infinity"):
        pulse.settle()
    pulse.settle()  # it was told
    pulse.saw("ids", torch.tensor([1]))
    pulse.saw("attn.o", torch.tensor([torch.finfo(torch.float32).max]))
    pulse.settle()


def test_a_collective_sends_no_nan() -> None:
    comm = WatchedComm(NoComm(), Pulse())
    comm.pulse.enter("layer 0")
    comm.pulse.begin("attn.o")
    assert comm.all_reduce(torch.ones(1), (0,)).tolist() == [1.0]
    with pytest.raises(NotFinite, match=r"layer 0, attn\.o"):
        comm.all_reduce(torch.tensor([torch.inf]), (0,))
    assert comm.pulse.waits is None
    with pytest.raises(RuntimeFault, match="one rank only"):
        comm.send(torch.ones(1), 1)


def test_what_is_concluded_from_signs() -> None:
    clock, patience = Clock(), 60.0
    lookout = Lookout(patience, clock)
    fine, wait = Sign(1, "rank 0", "layer 1, attn.o"), Sign(1, "rank 1", "layer 1, mlp.down", "all_reduce")
    assert lookout.judge([fine, wait]) is None
    clock.now = SILENCE + 1
    assert lookout.judge([replace(fine, number=2), replace(wait, ended=True)]) is None  # one that left says no more
    clock.now += SILENCE + 1
    fault = lookout.judge([replace(fine, number=2), replace(wait, number=3)])
    assert str(fault) == (
        "rank 0 died or was stopped: no sign of life for 11 s, last seen in layer 1, attn.o; "
        "rank 1 waits in layer 1, mlp.down, all_reduce"
    )
    assert lookout.judge([replace(fine, number=4, still=59.0), replace(wait, number=3, still=100.0)]) is None
    fault = lookout.judge([replace(fine, number=5, still=61.0), replace(wait, number=4, still=100.0)])
    assert str(fault).startswith("rank 0: layer 1, attn.o: no step for 61 s, more than the 60 s allowed by")
    stuck = replace(wait, number=6, still=61.0)
    assert "ranks wait for one another" in str(lookout.judge([stuck, replace(stuck, number=7)]))
    told = lookout.judge([replace(fine, number=8), replace(wait, number=8, ended=True, fault="rank 1: a nan")])
    assert isinstance(told, OtherRankStopped) and str(told) == "rank 1: a nan"


@pytest.fixture
def output(tiny: MakeCheckpoint, tmp_path: Path) -> Path:
    convert_tiny(tiny("llama"), tmp_path / "out", {"tp": 2, "pp": 2})
    return tmp_path / "out"


@pytest.mark.parametrize("tensor", ["attn.norm", "attn.qkv", "attn.o", "ffn.norm", "mlp.gate_up", "mlp.down"])
@pytest.mark.parametrize("compared", [True, False])
def test_a_nan_in_a_weight_stops_the_run(tensor: str, compared: bool, output: Path, tiny: MakeCheckpoint) -> None:
    """Rank 3 is the second of the second stage; what it makes doesn't spread to rank 2 first."""
    tamper.change(output, "stage-1-tp-1.safetensors", f"layers.2.{tensor}", tamper.not_a_number)
    result = verify_and_run(RunOptions(output, tiny("llama") if compared else None))
    assert failed(result) == ({"finite", "bytes"} if compared else {"finite"})
    assert checks(result)["finite"].where.startswith(f"rank 3: layer 2, {tensor}: the first result")
    assert checks(result)["finite"].worst is None


def test_a_virtual_rank_that_hangs_is_left(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fall_ill(monkeypatch, "hang", 2, 2, "mlp.gate_up")
    began = time.monotonic()
    with pytest.raises(RuntimeFault, match=r"^rank 2: layer 2, mlp\.gate_up: no step for .* by --timeout"):
        verify_and_run(RunOptions(output, timeout=1.0))
    assert time.monotonic() - began < 30


def test_a_slow_virtual_rank_is_not(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fall_ill.__globals__["HOW"], "slow", lambda: time.sleep(1.5))
    fall_ill(monkeypatch, "slow", 2, 2, "mlp.gate_up")
    assert verify_and_run(RunOptions(output, timeout=30.0)).passed


def test_a_timeout_of_nothing_is_refused(output: Path) -> None:
    with pytest.raises(RuntimeFault, match="--timeout is 0; it must be more than 0 seconds"):
        verify_and_run(RunOptions(output, timeout=0.0))


def test_a_stream_near_float16s_largest_number(own_tiny: MakeCheckpoint, tmp_path: Path) -> None:
    """Its norms don't overflow; a stream beyond that number does, and the operator is named."""
    source, name = own_tiny("qwen2_untied"), "model.embed_tokens.weight"
    path = next(path for path in source.glob("model*.safetensors") if name in load_file(path))
    kept = load_file(path)
    for largest, wrong in ((2e4, set()), (1e6, {"finite"})):
        scaled = kept[name].float() * (largest / kept[name].float().abs().max())
        save_file(kept | {name: scaled.to(kept[name].dtype)}, path, metadata={"format": "pt"})
        out = tmp_path / f"{largest:g}"
        convert_tiny(source, out, {"tp": 2})
        result = verify_and_run(RunOptions(out, source, compute="float16"))
        assert failed(result) == wrong
        assert not wrong or "the embedding, embed: " in checks(result)["finite"].where


def test_a_fault_that_one_rank_has_alone_is_raised_on_all() -> None:
    """Also one of a class that only its own package knows."""

    def step(comm: VirtualComm) -> str:
        def fail() -> None:
            if comm.rank == 0:
                raise SourceChanged("it was rewritten")

        with pytest.raises(CheckpointError, match="rank 0: it was rewritten"):
            agree(comm, torch.device("cpu"), fail)
        return "told"

    assert VirtualWorld(2).run(step) == ["told", "told"]
