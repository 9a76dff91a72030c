"""Signs of life that processes post for one another, through torchrun's store."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch import distributed as dist

from shard_plans.errors import RuntimeFault


@dataclass(frozen=True, slots=True)
class Sign:
    """What a process says of itself."""

    number: int = 0
    """Counts its signs: one that stays the same is of a process that died or was stopped."""
    who: str = ""
    """Who in it went on last: `rank 1`, `the reference`, ..."""
    where: str = "start-up"
    """... and with what: `layer 3, attn.o`."""
    waits: str | None = None
    """The collective in which it waits for others."""
    still: float = 0.0
    """Seconds since it went on to something else."""
    ended: bool = False
    """It left in good order, ..."""
    fault: str | None = None
    """... or because of this."""


class StoreBoard:
    """The signs of all ranks, kept in the key-value store that torchrun's processes share.

    Has a connection of its own, so that it works while a collective hangs.
    """

    def __init__(self, rank: int, world: int, patience: float) -> None:
        """Connect, and wait until every rank has come; RuntimeFault naming those that haven't after `patience` s."""
        self.rank, self.world = rank, world
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._keys = [f"reshard/alive/{start}/{other}" for other in range(world)]
        self._claim = f"reshard/alive/{start}/claim"
        wait = timedelta(seconds=patience)
        try:
            self._store = dist.TCPStore(  # type: ignore[attr-defined]  # public, and not in __all__
                host, port, world, False, wait, wait_for_workers=False
            )
            self.post(Sign(who=f"rank {rank}"))
        except RuntimeError as fault:
            raise RuntimeFault(f"rank {rank}: the store at {host}:{port} doesn't answer: {fault}") from fault
        try:
            self._store.wait(self._keys, wait)
        except RuntimeError as fault:
            late = [str(other) for other, key in enumerate(self._keys) if not self._store.check([key])]
            raise RuntimeFault(f"ranks {', '.join(late)} didn't start within {patience:g} s (--timeout)") from fault

    def post(self, sign: Sign) -> None:
        """Say what this process does; RuntimeError where the store is gone."""
        self._store.set(self._keys[self.rank], json.dumps(asdict(sign)))

    def read(self) -> Sequence[Sign]:
        """The latest sign of every rank, in rank order; RuntimeError where the store is gone."""
        return [Sign(**json.loads(raw)) for raw in self._store.multi_get(self._keys)]

    def claim(self) -> bool:
        """True for the first process that asks: it prints what ended the run."""
        try:
            return int(self._store.add(self._claim, 1)) == 1
        except RuntimeError:
            return True
