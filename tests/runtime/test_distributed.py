"""Processes over gloo must agree with virtual ranks; devices and launches that aren't there are refused."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, multiprocessing

from runtime.blocks.context import RankContext
from runtime.blocks.forward import run_layer
from runtime.blocks.weights import Stored
from runtime.comm import devices
from runtime.comm.comm import Comm
from runtime.comm.distributed import grid_groups, init
from runtime.comm.virtual import VirtualWorld
from shard_plans.errors import RuntimeFault
from shard_plans.families.model import Layer, Model
from shard_plans.placement.experts import ExpertPlacement
from shard_plans.placement.grid import Grid, make_grid
from tests.runtime.test_comm import everything


def test_groups_come_in_one_order() -> None:
    groups = grid_groups(make_grid(dp=2, tp=2, ep=2, pp=2))
    assert groups == sorted(set(groups)) and tuple(range(8)) in groups and (0, 1) in groups and (0, 2) in groups
    assert all(len(group) > 1 for group in groups)
    assert grid_groups(Grid()) == []


MOE = Layer(0, {}, {
    "attn": "gqa", "rope": "half", "ffn": "moe", "act": "silu", "score": "sigmoid", "renormalize": True,
    "shared": "added",
})  # fmt: skip
SIZES = {
    "hidden": 16, "vocab": 50, "heads": 4, "kv_heads": 2, "head_dim": 6, "experts": 6, "topk": 2, "expert_ffn": 12,
    "shared_ffn": 12,
}  # fmt: skip
MODEL = Model("made", {}, {"rope_theta": 1e4}, SIZES, (MOE,), {"stream": "plain", "norm": "rms", "eps": 1e-6}, False)
FOLDED = make_grid(dp=2, tp=2, ep=2)


def moe_layer(comm: Comm) -> Tensor:
    """A layer with uneven, redundant experts over dp 2, tp 2, ep 2, etp 2; weights are random, each rank its own."""
    slots = ((0, 1, 2, 3), (4, 5, 0))
    at = FOLDED.coordinate(comm.rank)
    shapes = {
        "attn.norm": (16,), "attn.qkv": (24, 16), "attn.o": (16, 12), "ffn.norm": (16,), "moe.router": (6, 16),
        "experts.gate_up": (len(slots[at.ep]), 12, 16), "experts.down": (len(slots[at.ep]), 16, 6),
        "shared.gate_up": (12, 16), "shared.down": (16, 6),
    }  # fmt: skip
    weights = {}
    for name, shape in shapes.items():
        whole = name in ("moe.router", "attn.norm", "ffn.norm")  # the same on every rank
        generator = torch.Generator().manual_seed(len(name) + (0 if whole else 100 * comm.rank))
        weights[name] = Stored(torch.randn(shape, generator=generator) / 2)
    ctx = RankContext(FOLDED, at, comm, MODEL, ExpertPlacement(slots), torch.float32, torch.device("cpu"))
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(at.dp))
    return run_layer(ctx, MOE, weights, x, None, torch.arange(5))[0]


def process(rank: int, world: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    grid = FOLDED if world == 4 else make_grid(tp=2)
    comm = init(grid, torch.device("cpu"))
    with torch.no_grad():
        results = everything(comm) if world == 2 else [*everything(comm), moe_layer(comm)]
    with pytest.raises(RuntimeFault, match="no process group was made for ranks"):
        comm.all_reduce(torch.ones(1), tuple(reversed(range(world))))
    torch.save(results, Path(folder) / f"{rank}.pt")
    comm.close()


def ahead(rank: int, port: int, folder: str) -> None:
    """Rank 1 receives nothing before rank 0 has sent three micro-batches, larger than any buffer between them."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    comm, sent = init(make_grid(pp=2), torch.device("cpu")), Path(folder) / "sent"
    if rank == 0:
        x = torch.zeros(4 << 20)
        for batch in range(3):
            comm.send(x.fill_(batch), 1)  # a copy is sent: the stage goes on with its memory
        sent.touch()
    else:
        while not sent.exists():
            time.sleep(0.05)
        found = [comm.recv(0, (4 << 20,), torch.float32) for _ in range(3)]
        assert [(int(x[0]), int(x[-1])) for x in found] == [(0, 0), (1, 1), (2, 2)]
    comm.barrier()
    comm.close()


def test_a_stage_goes_on_before_the_next_has_received(tmp_path: Path) -> None:
    multiprocessing.spawn(ahead, (free_port(), str(tmp_path)), 2)  # type: ignore[attr-defined,no-untyped-call]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("world", [2, 4])
def test_processes_over_gloo_equal_virtual_ranks(world: int, tmp_path: Path) -> None:
    multiprocessing.spawn(process, (world, free_port(), str(tmp_path)), world)  # type: ignore[attr-defined,no-untyped-call]
    expected = VirtualWorld(world).run(
        lambda comm: everything(comm) if world == 2 else [*everything(comm), moe_layer(comm)]
    )
    for rank in range(world):
        results = torch.load(tmp_path / f"{rank}.pt")
        for x, y in zip(results, expected[rank], strict=True):
            assert x.shape == y.shape and x.dtype == y.dtype
            assert torch.allclose(x, y, rtol=1e-6, atol=1e-6)


def test_a_launch_that_does_not_fit_the_plan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RuntimeFault, match="torchrun didn't start this process"):
        init(Grid(), torch.device("cpu"))
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeFault, match="torchrun started 3 processes, the plan has 2 ranks"):
        init(make_grid(tp=2), torch.device("cpu"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeFault, match=r"no collective backend nonsense; it knows .*gloo"):
        init(make_grid(tp=2), torch.device("cpu"), "nonsense")


def test_devices_are_found_by_name() -> None:
    assert devices.open_device("cpu") == torch.device("cpu")
    assert devices.available()[-1] == "cpu" and devices.backend_of(torch.device("cpu")) == "gloo"
    devices.synchronize(torch.device("cpu"))
    with pytest.raises(RuntimeFault, match="no device tpu; known are cuda, musa, npu, xpu, cpu, and this machine has"):
        devices.open_device("tpu")
    with pytest.raises(RuntimeFault, match="no collective backend is known for meta"):
        devices.backend_of(torch.device("meta"))


@pytest.mark.parametrize("kind", ["cuda", "musa", "npu", "xpu"])
def test_a_device_that_is_not_there_is_refused(kind: str) -> None:
    if kind in devices.available():
        with pytest.raises(RuntimeFault, match="doesn't exist, this machine has"):
            devices.open_device(f"{kind}:99")
        with pytest.raises(RuntimeFault, match="isn't a card's number"):
            devices.open_device(f"{kind}:x")
    else:
        with pytest.raises(RuntimeFault, match=f"no device {kind} here.*this machine has"):
            devices.open_device(kind)
