"""What a pass takes at its peak: the planner's replay in shapes against the storages that the runtime makes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from runtime.alive.pulse import Pulse
from runtime.blocks.context import RankContext
from runtime.comm.comm import NoComm
from runtime.loading.loader import Loader, LoadOptions
from runtime.opened import Opened, open_output
from runtime.passes import RankRun, batch_pass, next_piece
from shard_plans.memory.replay.passes import pass_peak, sections_of
from shard_plans.placement.place import place
from tests.conftest import MakeCheckpoint
from tests.tools.converted import bound, converted
from tests.tools.plans import make_plan
from tests.tools.sharded import Watch
from tests.tools.storages import Storages

CPU = torch.device("cpu")
TINY = [
    "llama",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen3_moe",
    "deepseek_v3",
    "qwen3_moe_fp8",
    "deepseek_v3_fp8",
    "deepseek_v3_full_q",
]
BYTES = {torch.bfloat16: 2, torch.float32: 4, torch.float64: 8}


class Unwatched(Pulse):
    """Nobody asks whether results are finite: what that takes isn't replayed."""

    def saw(self, operator: str, y: Tensor) -> Tensor:
        """`y` itself."""
        return y


def run(opened: Opened, ids: Tensor, compute: torch.dtype, watch: Watch | None) -> Storages:
    """One pass of the only rank of an output; with what it took."""
    grid = opened.plan.grid
    ctx = RankContext(
        grid, grid.coordinate(0), NoComm(), opened.model, opened.plan.experts, compute, CPU, pulse=Unwatched()
    )
    positions = torch.arange(len(ids))
    with Loader(opened.out, opened.root, [0], len(opened.model.forward_layers), LoadOptions(CPU)) as loader:
        rank = RankRun(ctx, loader, opened.plan.stages, lockstep=False)
        found = Storages()
        with torch.no_grad(), found:
            batch_pass(rank, [next_piece(rank, ids, positions, None)], watch)
    return found


def rows_of_experts(routes: Mapping[int, Tensor], experts: int) -> dict[int, list[int]]:
    return {layer: torch.bincount(chosen.flatten(), minlength=experts).tolist() for layer, chosen in routes.items()}


def peaks(source: Path, out: Path, tokens: int, compute: torch.dtype) -> tuple[int, int]:
    """Measured and predicted, on one rank."""
    if not out.exists():
        converted(source, out)
    opened = open_output(out)
    ids = torch.randint(0, opened.model.sizes["vocab"], (tokens,), generator=torch.Generator().manual_seed(1))
    watch = Watch()
    if opened.model.sizes.get("experts"):
        run(opened, ids, compute, watch)
    routed = rows_of_experts(watch.routes, opened.model.sizes.get("experts", 0))
    binding = bound(source)
    sections = sections_of(place(binding, make_plan(binding)), 0)
    predicted = pass_peak(opened.model, opened.plan.grid, sections, tokens, BYTES[compute], routed)
    return run(opened, ids, compute, None).peak, predicted


@pytest.mark.parametrize("family", TINY)
def test_the_replay_is_exact(tiny: MakeCheckpoint, tmp_path: Path, family: str) -> None:
    for tokens, compute in ((7, torch.bfloat16), (7, torch.float32), (100, torch.float32)):
        measured, predicted = peaks(tiny(family), tmp_path / "out", tokens, compute)
        assert predicted == measured, (tokens, compute)


def test_scores_in_pieces(tiny: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten pieces of the queries: what is replayed are three of them."""
    for module in ("runtime.blocks.attention", "shard_plans.memory.replay.attention"):
        monkeypatch.setattr(f"{module}.SCORES_AT_ONCE", 8 * 100 * 10)
    for family in ("qwen3", "deepseek_v3"):
        measured, predicted = peaks(tiny(family), tmp_path / family, 100, torch.float32)
        assert predicted == measured


def test_other_routes_and_lengths_peak_elsewhere(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    """At so few tokens the experts take the most: all rows to one expert is another peak; so is a token more."""
    source = tiny("mixtral")
    measured, predicted = peaks(source, tmp_path / "out", 7, torch.float32)
    binding, opened = bound(source), open_output(tmp_path / "out")
    sections = sections_of(place(binding, make_plan(binding)), 0)
    one = {layer.index: [14] + [0] * 7 for layer in opened.model.layers}
    others = [pass_peak(opened.model, opened.plan.grid, sections, tokens, 4, one) for tokens in (7, 8)]
    assert predicted == measured and len({predicted, *others}) == 3


@pytest.mark.slow
def test_a_trained_model_at_2000_tokens(real: Callable[[int], Path], tmp_path: Path) -> None:
    measured, predicted = peaks(real(0), tmp_path / "out", 2000, torch.float32)
    assert predicted == measured
    resident = allocated(tmp_path / "out", 2000)
    assert predicted == pytest.approx(resident, rel=0.1)


def allocated(out: Path, tokens: int) -> int:
    """Bytes by which a process grows in one pass, as the system counts them, its weights loaded before."""
    script = f"""
import re, sys
from pathlib import Path
import torch
from tests.runtime.test_peak import resident_growth
print(resident_growth(Path({str(out)!r}), {tokens}))
"""
    steady = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    words = [sys.executable, "-c", script]
    done = subprocess.run(words, check=True, capture_output=True, text=True, env={**os.environ, **steady})
    return int(done.stdout.split()[-1])


def resident_growth(out: Path, tokens: int) -> int:
    """In this process: peak resident memory of the second pass over what was resident before it."""
    torch.set_num_threads(1)
    opened = open_output(out)
    grid = opened.plan.grid
    ids = torch.randint(0, opened.model.sizes["vocab"], (tokens,), generator=torch.Generator().manual_seed(1))
    ctx = RankContext(
        grid, grid.coordinate(0), NoComm(), opened.model, opened.plan.experts, torch.float32, CPU, pulse=Unwatched()
    )
    options = LoadOptions(CPU, budget=1 << 40)
    with Loader(out, opened.root, [0], len(opened.model.forward_layers), options) as loader, torch.no_grad():
        rank = RankRun(ctx, loader, opened.plan.stages, lockstep=False)
        batch_pass(rank, [next_piece(rank, ids[:16], torch.arange(16), None)])
        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS")
        batch_pass(rank, [next_piece(rank, ids, torch.arange(tokens), None)])
        return status("VmHWM") - before


def status(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in text.splitlines() if line.startswith(f"{field}:")))
