"""What one virtual rank communicates by: each collective meets the others' in the VirtualWorld of all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from runtime.comm.comm import Group, check_broadcast, check_call, check_dtype, check_like, check_peer

if TYPE_CHECKING:
    from runtime.comm.virtual import VirtualWorld

T = TypeVar("T")


@dataclass(slots=True)
class Call:
    """A collective that a rank has entered and waits in."""

    kind: str
    group: Group
    payload: Any
    like: tuple[Any, ...]  # what must agree between all members


class VirtualComm:
    """The Comm of one virtual rank."""

    def __init__(self, world: VirtualWorld, rank: int) -> None:
        self._world = world
        self.rank = rank
        self.world = world.world

    def all_reduce(self, x: Tensor, group: Group) -> Tensor:
        """The sum in the group's order."""
        check_call("all_reduce", self, group, [x])
        return self._meet("all_reduce", group, x, (tuple(x.shape), x.dtype), _sum)

    def all_gather(self, x: Tensor, group: Group) -> list[Tensor]:
        """Copies of every member's tensor."""
        check_call("all_gather", self, group, [x])
        like = (tuple(x.shape[1:]), x.dtype)
        return self._meet("all_gather", group, x, like, lambda xs: [[x.clone() for x in xs] for _ in xs])

    def all_to_all(self, parts: Sequence[Tensor], group: Group) -> list[Tensor]:
        """Copies of what each member meant for this rank."""
        check_call("all_to_all", self, group, parts, one_a_member=True)
        like = (tuple(parts[0].shape[1:]), parts[0].dtype)
        return self._meet("all_to_all", group, list(parts), like, _transpose)

    def send(self, x: Tensor, to: int) -> None:
        """Copy `x` to rank `to`'s mail; returns at once."""
        check_dtype("send", x)
        check_peer("send to", self, to)
        self._world.post(self.rank, to, x)

    def recv(self, sender: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The next message of `sender`."""
        check_peer("receive from", self, sender)
        x = self._world.fetch(self.rank, sender)
        check_like("recv", f"rank {sender} sent rank {self.rank}", x, shape, dtype)
        return x

    def broadcast(self, x: Tensor | None, root: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A copy of the root's tensor."""
        return self._from_root("broadcast", x, root, shape, dtype, _copies)

    def share(self, x: Tensor | None, root: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The same copy on all ranks."""
        return self._from_root("share", x, root, shape, dtype, lambda found, count: [found.clone()] * count)

    def _from_root(
        self, kind: str, x: Tensor | None, root: int, shape: Sequence[int], dtype: torch.dtype,
        deal: Callable[[Tensor, int], list[Tensor]],
    ) -> Tensor:  # fmt: skip
        if self.rank == root:
            x = check_broadcast(self, x, root, shape, dtype)
        like = (root, tuple(shape), dtype)
        return self._meet(kind, tuple(range(self.world)), x, like, lambda xs: deal(xs[root], len(xs)))

    def barrier(self) -> None:
        """Return once every rank has come here."""
        self._meet("barrier", tuple(range(self.world)), None, (), lambda xs: xs)

    def _meet(self, kind: str, group: Group, payload: Any, like: Any, finish: Callable[[list[Any]], list[T]]) -> T:
        result: T = self._world.meet(self.rank, Call(kind, group, payload, like), finish)
        return result


def _sum(xs: Sequence[Tensor]) -> list[Tensor]:
    total = xs[0].clone()
    for x in xs[1:]:
        total += x
    return _copies(total, len(xs))


def _transpose(sent: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    return [[parts[member].clone() for parts in sent] for member in range(len(sent))]


def _copies(x: Tensor, count: int) -> list[Tensor]:
    return [x.clone() for _ in range(count)]
