"""Starting the ranks: all in this process, or its one under torchrun. Faults before the run reach every rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

import torch

from runtime.alive.leaving import leave
from runtime.alive.pulse import Pulse
from runtime.alive.signs import StoreBoard
from runtime.alive.watch import Watch
from runtime.alive.watched import WatchedComm
from runtime.checking.checks import gather
from runtime.comm.comm import Comm, NoComm
from runtime.comm.distributed import init, under_torchrun
from runtime.comm.virtual import VirtualWorld
from runtime.request import RunOptions
from runtime.session import Job, Outcome, run_rank
from shard_plans import errors
from shard_plans.errors import NotFinite, OtherRankStopped, ReshardError, RuntimeFault
from shard_plans.placement.grid import Grid

T = TypeVar("T")


def one_rank_a_process() -> bool:
    """Whether torchrun started several processes."""
    return under_torchrun() and os.environ["WORLD_SIZE"] != "1"


def agree(comm: Comm | None, device: torch.device, step: Callable[[], T]) -> T:
    """Take a step that may fail on some rank alone; if it does, its fault is raised on every rank."""
    value: T | None = None
    fault: ReshardError | None = None
    try:
        value = step()
    except ReshardError as found:
        fault = found
    if comm is not None:
        told = gather(comm, device, None if fault is None else [_kind(fault), str(fault)])
        for rank, words in enumerate(told):
            if words is not None:
                raise getattr(errors, words[0])(f"rank {rank}: {words[1]}") from fault
    if fault is not None:
        raise fault
    return value  # type: ignore[return-value]  # a step that doesn't fail has a value


def _kind(fault: ReshardError) -> str:
    """The fault's class, or the nearest above it, that every rank knows by name; a package may have its own."""
    return next(str(kind.__name__) for kind in type(fault).__mro__ if vars(errors).get(kind.__name__) is kind)


def join(grid: Grid, device: torch.device, options: RunOptions, stack: ExitStack) -> tuple[WatchedComm, Watch]:
    """Take this process's place among those that torchrun started, and watch over them until `stack` ends."""
    own = init(grid, device, options.backend)
    stack.callback(own.close)
    board = StoreBoard(own.rank, own.world, options.timeout)
    watch = stack.enter_context(Watch(options.timeout, leave(options.report), board))
    return WatchedComm(own, watch.add(f"rank {own.rank}", Pulse())), watch


def run_ranks(job: Job, comm: WatchedComm | None, watch: Watch | None, patience: float) -> Outcome:
    """Run every rank of the plan, or this process's, and return what rank 0 (or this one) found.

    A nan stops the run with NotFinite; so does, by RuntimeFault, a virtual rank that hangs for `patience` seconds.
    """
    if comm is None:
        return _run_virtual(job, patience)
    try:
        return run_rank(job, comm)
    except NotFinite as fault:
        raise NotFinite(f"rank {comm.rank}: {fault}") from fault
    except RuntimeError as fault:
        if watch is not None:
            watch.blame()
        raise OtherRankStopped(f"rank {comm.rank} stopped, most likely because another one did: {fault}") from fault


def _run_virtual(job: Job, patience: float) -> Outcome:
    world = job.opened.plan.grid.world
    ranks = VirtualWorld(world)
    with Watch(patience, lambda fault, _: ranks.abandon(fault)) as watch:
        if job.reference is not None:
            watch.add("the reference", job.reference.context.pulse)

        def run(comm: Comm) -> Outcome:
            pulse = watch.add(f"rank {comm.rank}", Pulse())
            try:
                return run_rank(job, WatchedComm(comm if world > 1 else NoComm(), pulse))
            except ReshardError:
                raise
            except Exception as fault:  # torch's own, of shapes that don't fit: it says nothing of the place
                raise RuntimeFault(f"{pulse.where}: {type(fault).__name__}: {fault}") from fault

        return ranks.run(run)[0]
