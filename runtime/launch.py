"""Starting the ranks: all in this process, or its one under torchrun. Faults before the run reach every rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

import torch

from runtime.checking.checks import gather
from runtime.comm.comm import NoComm
from runtime.comm.devices import free_bytes
from runtime.comm.distributed import DistributedComm, under_torchrun
from runtime.comm.virtual import VirtualWorld
from runtime.loading.loader import Loader, LoadOptions
from runtime.opened import Opened
from runtime.session import Job, Outcome, run_rank
from shard_plans import errors
from shard_plans.errors import OtherRankStopped, ReshardError

T = TypeVar("T")


def one_rank_a_process() -> bool:
    """Whether torchrun started several processes."""
    return under_torchrun() and os.environ["WORLD_SIZE"] != "1"


def agree(comm: DistributedComm | None, device: torch.device, step: Callable[[], T]) -> T:
    """Take a step that may fail on some rank alone; if it does, its fault is raised on every rank."""
    value: T | None = None
    fault: ReshardError | None = None
    try:
        value = step()
    except ReshardError as found:
        fault = found
    if comm is not None:
        told = gather(comm, device, None if fault is None else [type(fault).__name__, str(fault)])
        for rank, words in enumerate(told):
            if words is not None:
                raise getattr(errors, words[0])(f"rank {rank}: {words[1]}") from fault
    if fault is not None:
        raise fault
    return value  # type: ignore[return-value]  # a step that doesn't fail has a value


def run_ranks(job: Job, comm: DistributedComm | None) -> Outcome:
    """Run every rank of the plan, or this process's, and return what rank 0 (or this one) found."""
    world = job.opened.plan.grid.world
    if comm is None:
        return VirtualWorld(world).run(lambda c: run_rank(job, c))[0] if world > 1 else run_rank(job, NoComm())
    try:
        return run_rank(job, comm)
    except RuntimeError as fault:
        raise OtherRankStopped(f"rank {comm.rank} stopped, most likely because another one did: {fault}") from fault


def tower_loader(opened: Opened, comm: DistributedComm | None, options: LoadOptions, stack: ExitStack) -> Loader | None:
    """What loads the vision tower, for this process's ranks of the first stage; None if it has none."""
    ranks = [rank for rank in range(opened.plan.grid.stage_ranks) if comm is None or comm.rank == rank]
    return stack.enter_context(Loader(opened.out, opened.root, ranks, 0, options)) if ranks else None


def room(device: torch.device) -> int:
    """Bytes of weights that may stay in memory from one token to the next: half of what is free, shared fairly."""
    shared = 1 if device.type != "cpu" else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return free_bytes(device) // 2 // shared
