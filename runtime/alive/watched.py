"""A Comm that tells a pulse in which collective the rank is, and lets no nan go out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from runtime.alive.pulse import Pulse
from runtime.comm.comm import Comm, Group


class WatchedComm:
    """The collectives of `comm`; each first settles what the rank's operators made, and raises NotFinite.

    So does a nan or an infinity among what is summed or sent on; what is gathered or broadcast may hold measures.
    """

    def __init__(self, comm: Comm, pulse: Pulse) -> None:
        self._comm, self.pulse = comm, pulse
        self.rank, self.world = comm.rank, comm.world

    def all_reduce(self, x: Tensor, group: Group) -> Tensor:
        """As Comm says; so are all of them."""
        with self._sent("all_reduce of ranks", group, [x]):
            return self._comm.all_reduce(x, group)

    def all_gather(self, x: Tensor, group: Group) -> list[Tensor]:
        """See Comm."""
        with self._sent("all_gather of ranks", group):
            return self._comm.all_gather(x, group)

    def all_to_all(self, parts: Sequence[Tensor], group: Group) -> list[Tensor]:
        """See Comm."""
        with self._sent("all_to_all of ranks", group, parts):
            return self._comm.all_to_all(parts, group)

    def send(self, x: Tensor, to: int) -> None:
        """See Comm."""
        with self._sent("send to rank", (to,), [x]):
            self._comm.send(x, to)

    def recv(self, sender: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See Comm."""
        with self._sent("recv from rank", (sender,)):
            return self._comm.recv(sender, shape, dtype)

    def broadcast(self, x: Tensor | None, root: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See Comm."""
        with self._sent("broadcast from rank", (root,)):
            return self._comm.broadcast(x, root, shape, dtype)

    def share(self, x: Tensor | None, root: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See Comm."""
        with self._sent("broadcast from rank", (root,)):
            return self._comm.share(x, root, shape, dtype)

    def barrier(self) -> None:
        """See Comm."""
        with self._sent("barrier", ()):
            self._comm.barrier()

    def _sent(self, kind: str, group: Group, tensors: Iterable[Tensor] = ()) -> AbstractContextManager[None]:
        for x in tensors:
            self.pulse.saw(self.pulse.operator or kind, x)
        self.pulse.settle()
        return self.pulse.waiting(f"{kind} {', '.join(map(str, group))}" if group else kind)
