"""Ranks as processes: torch.distributed under torchrun."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from runtime.comm.comm import Group, check_broadcast, check_call, check_dtype, check_peer
from runtime.comm.devices import backend_of
from shard_plans.errors import RuntimeFault
from shard_plans.placement.grid import Grid

PATIENCE = timedelta(hours=6)
"""How long a rank waits in a collective: the others wait while rank 0 compares every byte with the checkpoint."""

IN_FLIGHT = 64
"""Messages of a rank that may be under way; before one more is sent, the oldest must have been received."""


def under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ


def init(grid: Grid, device: torch.device, backend: str | None = None) -> DistributedComm:
    """Join the processes that torchrun started, one rank of `grid` each, and make every group the grid needs.

    `backend` overrides the device's usual collective library. Raises RuntimeFault where the number of processes isn't
    the grid's, or the library isn't there.
    """
    if not under_torchrun():
        raise RuntimeFault("torchrun didn't start this process (RANK, WORLD_SIZE or MASTER_ADDR isn't set)")
    world = int(os.environ["WORLD_SIZE"])
    if world != grid.world:
        raise RuntimeFault(
            f"torchrun started {world} processes, the plan has {grid.world} ranks; "
            f"start {grid.world}, or one without torchrun for virtual ranks"
        )
    if not dist.is_initialized():
        name = backend or backend_of(device)
        if not dist.is_backend_available(name):
            raise RuntimeFault(f"this torch has no collective backend {name}; it knows {', '.join(_backends())}")
        try:
            dist.init_process_group(name, timeout=PATIENCE)
        except (RuntimeError, ValueError) as fault:
            raise RuntimeFault(f"the collective backend {name} can't start: {fault}") from fault
    return DistributedComm(grid, device)


def grid_groups(grid: Grid) -> list[Group]:
    """Every group of more than one rank that a forward pass over `grid` uses, and the whole world, in a fixed order."""
    groups = {tuple(range(grid.world))}
    for at in grid.coordinates():
        groups |= {grid.tp_group(at), grid.ep_group(at), grid.etp_group(at)}
    return sorted(group for group in groups if len(group) > 1)


def _backends() -> list[str]:
    return [name for name in dist.Backend.backend_list if dist.is_backend_available(name)]


class DistributedComm:
    """The Comm of one process. All processes make the same groups in the same order when it is created."""

    def __init__(self, grid: Grid, device: torch.device) -> None:
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self._device = device
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self._groups: dict[Group, Any] = {group: dist.new_group(list(group)) for group in grid_groups(grid)}

    def all_reduce(self, x: Tensor, group: Group) -> Tensor:
        """The sum, in the library's own order."""
        check_call("all_reduce", self, group, [x])
        if len(group) == 1:
            return x
        total = x.contiguous().clone()
        dist.all_reduce(total, group=self._group(group))
        return total

    def all_gather(self, x: Tensor, group: Group) -> list[Tensor]:
        """Every member's tensor; rows are padded to the longest for the transfer."""
        check_call("all_gather", self, group, [x])
        if len(group) == 1:
            return [x]
        rows = self._exchange_rows([x.shape[0]] * len(group), group)
        longest = max(rows)
        if longest == 0:
            return [x.clone() for _ in group]
        padded = x.new_zeros((longest, *x.shape[1:]))
        padded[: x.shape[0]] = x
        gathered = [torch.empty_like(padded) for _ in group]
        dist.all_gather(gathered, padded, group=self._group(group))
        return [part[:count] for part, count in zip(gathered, rows, strict=True)]

    def all_to_all(self, parts: Sequence[Tensor], group: Group) -> list[Tensor]:
        """What each member meant for this rank; row counts are exchanged first."""
        check_call("all_to_all", self, group, parts, one_a_member=True)
        if len(group) == 1:
            return list(parts)
        sent = [part.shape[0] for part in parts]
        rows = self._exchange_rows(sent, group)
        inbox = parts[0].new_empty((sum(rows), *parts[0].shape[1:]))
        dist.all_to_all_single(inbox, torch.cat(list(parts)), rows, sent, group=self._group(group))
        return list(torch.split(inbox, rows))

    def send(self, x: Tensor, to: int) -> None:
        """Returns at once, so that a pipeline stage can take its next micro-batch; a copy waits for the receiver."""
        check_dtype("send", x)
        check_peer("send to", self, to)
        if len(self._sent) == IN_FLIGHT:
            self._sent.popleft()[0].wait()
        kept = x.contiguous().clone()
        self._sent.append((dist.isend(kept, to), kept))

    def recv(self, sender: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The next message of `sender`."""
        check_peer("receive from", self, sender)
        x = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        dist.recv(x, sender)
        return x

    def broadcast(self, x: Tensor | None, root: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The root's tensor."""
        if self.rank == root:
            y = check_broadcast(self, x, root, shape, dtype).contiguous().clone()
        else:
            y = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        dist.broadcast(y, root)
        return y

    def share(self, x: Tensor | None, root: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The root's tensor."""
        return self.broadcast(x, root, shape, dtype)

    def barrier(self) -> None:
        """Return once every rank has come here."""
        # An all_reduce instead of dist.barrier, which picks a device by itself.
        dist.all_reduce(torch.zeros(1, device=self._device))

    def close(self) -> None:
        """Leave the group; no collective may follow, and what was sent and not received is lost."""
        self._sent.clear()
        dist.destroy_process_group()

    def _group(self, group: Group) -> Any:
        if group not in self._groups:
            raise RuntimeFault(f"no process group was made for ranks {group}; the grid's are {sorted(self._groups)}")
        return self._groups[group]

    def _exchange_rows(self, rows: list[int], group: Group) -> list[int]:
        outbox = torch.tensor(rows, dtype=torch.int64, device=self._device)
        inbox = torch.empty_like(outbox)
        dist.all_to_all_single(inbox, outbox, group=self._group(group))
        return [int(count) for count in inbox.tolist()]
