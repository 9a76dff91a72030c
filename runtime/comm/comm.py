"""What ranks say to one another: one interface, implemented by one rank, by virtual ranks and by torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from shard_plans.errors import RuntimeFault

Group = tuple[int, ...]
"""Ranks that take part in a collective, in order; every member passes the same tuple."""


class Comm(Protocol):
    """The collectives of one rank. Results are new tensors; sums are taken in the group's order where that is possible.

    Every member of a group calls the same collectives of that group in the same order. Float8 is never sent.
    """

    @property
    def rank(self) -> int:
        """This rank, 0 <= rank < world."""

    @property
    def world(self) -> int:
        """Number of ranks."""

    def all_reduce(self, x: Tensor, group: Group) -> Tensor:
        """The sum of every member's `x` (all of one shape and dtype)."""

    def all_gather(self, x: Tensor, group: Group) -> list[Tensor]:
        """Every member's `x`, in the group's order; the first dimension may differ from rank to rank, even be 0."""

    def all_to_all(self, parts: Sequence[Tensor], group: Group) -> list[Tensor]:
        """`parts[i]` goes to the group's member i; returns what each member sent here. First dimensions may differ."""

    def send(self, x: Tensor, to: int) -> None:
        """Hand a copy of `x` to rank `to`, which calls `recv`; returns at once."""

    def recv(self, sender: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The next tensor that `sender` sent here; it must have this shape and dtype."""

    def broadcast(self, x: Tensor | None, root: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Rank `root`'s `x` on all ranks; the others pass None. All state its shape and dtype."""

    def share(self, x: Tensor | None, root: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """As broadcast; virtual ranks get one copy for all, which nobody may change."""

    def barrier(self) -> None:
        """Return once every rank has come here."""


class NoComm:
    """One rank alone: every collective gives back what it was given."""

    rank = 0
    world = 1

    def all_reduce(self, x: Tensor, group: Group) -> Tensor:
        """`x` itself."""
        check_call("all_reduce", self, group, [x])
        return x

    def all_gather(self, x: Tensor, group: Group) -> list[Tensor]:
        """`[x]`."""
        check_call("all_gather", self, group, [x])
        return [x]

    def all_to_all(self, parts: Sequence[Tensor], group: Group) -> list[Tensor]:
        """`parts` as a list."""
        check_call("all_to_all", self, group, parts, one_a_member=True)
        return list(parts)

    def send(self, x: Tensor, to: int) -> None:
        """There is nobody to send to: RuntimeFault."""
        raise RuntimeFault(f"rank 0 sends to rank {to}, but there is one rank only")

    def recv(self, sender: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """There is nobody to receive from: RuntimeFault."""
        raise RuntimeFault(f"rank 0 waits for rank {sender}, but there is one rank only")

    def broadcast(self, x: Tensor | None, root: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """`x` itself."""
        return check_broadcast(self, x, root, shape, dtype)

    def share(self, x: Tensor | None, root: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """`x` itself."""
        return self.broadcast(x, root, shape, dtype)

    def barrier(self) -> None:
        """Nothing to wait for."""


def check_call(kind: str, comm: Comm, group: Group, tensors: Sequence[Tensor], one_a_member: bool = False) -> None:
    """Raise RuntimeFault unless this rank may call `kind` over `group` with these tensors."""
    if comm.rank not in group or len(set(group)) != len(group) or not all(0 <= r < comm.world for r in group):
        raise RuntimeFault(
            f"{kind}: rank {comm.rank} called it over the group {group}; a group holds the caller, each rank once, "
            f"and ranks 0 to {comm.world - 1} only"
        )
    if one_a_member and len(tensors) != len(group):
        raise RuntimeFault(f"{kind}: rank {comm.rank} passed {len(tensors)} parts for {len(group)} members")
    for x in tensors:
        check_dtype(kind, x)


def check_dtype(kind: str, x: Tensor) -> None:
    """Raise RuntimeFault for float8, which collective libraries don't carry."""
    if x.is_floating_point() and x.element_size() == 1:
        raise RuntimeFault(f"{kind}: {x.dtype} can't be sent between ranks; convert it to the compute dtype first")


def check_peer(what: str, comm: Comm, peer: int) -> None:
    """Raise RuntimeFault unless `peer` is another rank of the world."""
    if not 0 <= peer < comm.world or peer == comm.rank:
        raise RuntimeFault(f"rank {comm.rank} can't {what} rank {peer}; the world is ranks 0 to {comm.world - 1}")


def check_broadcast(comm: Comm, x: Tensor | None, root: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The root's own tensor, checked against the shape and dtype that all ranks expect."""
    if x is None:
        raise RuntimeFault(f"broadcast: root {root} is rank {comm.rank}, which passed no tensor")
    check_like("broadcast", f"rank {root} passed", x, shape, dtype)
    check_dtype("broadcast", x)
    return x


def check_like(kind: str, who: str, x: Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Raise RuntimeFault unless `x` has the expected shape and dtype."""
    if tuple(x.shape) != tuple(shape) or x.dtype != dtype:
        raise RuntimeFault(f"{kind}: {who} {tuple(x.shape)} {x.dtype}, expected {tuple(shape)} {dtype}")
