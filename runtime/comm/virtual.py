"""Virtual ranks: all ranks of a plan in one process, a thread each, exactly one of them computing at a time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from runtime.comm.virtual_comm import Call, VirtualComm
from shard_plans.errors import ReshardError, RuntimeFault

T = TypeVar("T")

PATIENCE = 0.2
"""Seconds between two looks whether a run was abandoned."""


class _Aborted(BaseException):
    """Unwinds a rank after another one failed; never leaves this module."""


@dataclass(slots=True)
class _Seat:
    """One rank's place in the turn order."""

    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    call: Call | None = None
    waits_for: int | None = None  # the rank whose message it waits for
    result: Any = None
    done: bool = False

    @property
    def ready(self) -> bool:
        return not self.done and self.call is None and self.waits_for is None

    @property
    def state(self) -> str:
        if self.call is not None:
            return f"is in {self.call.kind} over {self.call.group}"
        return "has ended" if self.waits_for is None else f"waits for a message of rank {self.waits_for}"


class VirtualWorld:
    """`world` ranks on one device. The turn passes at collectives only, so a run is deterministic.

    A rank that fails ends all; ranks that wait for one another for ever are noticed at once and named.
    """

    def __init__(self, world: int) -> None:
        if world < 1:
            raise RuntimeFault(f"{world} virtual ranks; there must be at least one")
        self.world = world
        self._seats: list[_Seat] = []
        self._mail: dict[tuple[int, int], deque[Tensor]] = {}
        self._failure: tuple[int, BaseException] | None = None
        self._abandoned = False

    def run(self, fn: Callable[[VirtualComm], T]) -> list[T]:
        """Call `fn` once a rank with that rank's Comm, without gradients; return what each rank returned.

        A rank's ReshardError is raised again as the same class with the rank named; anything else as RuntimeFault.
        """
        self._seats = [_Seat() for _ in range(self.world)]
        self._mail, self._failure, self._abandoned = {}, None, False
        results: list[Any] = [None] * self.world
        threads = [
            threading.Thread(target=self._live, args=(rank, fn, results), name=f"rank-{rank}", daemon=True)
            for rank in range(self.world)
        ]
        try:
            for thread in threads:
                thread.start()
            self._seats[0].turn.release()
            for thread in threads:
                while thread.is_alive() and not self._abandoned:
                    thread.join(PATIENCE)
        except BaseException as fault:
            self._fail(-1, fault)
            raise
        self._raise_failure()
        return results

    def abandon(self, fault: ReshardError) -> None:
        """End `run` with this fault, from another thread, though a rank hangs: its thread is left behind."""
        self._fail(-1, fault)
        self._abandoned = True

    def _raise_failure(self) -> None:
        rank, fault = self._failure or (-1, None)
        if fault is not None and rank < 0:
            raise fault
        if isinstance(fault, ReshardError):
            raise type(fault)(f"rank {rank}: {fault}") from fault
        if fault is not None:
            raise RuntimeFault(f"rank {rank}: {type(fault).__name__}: {fault}") from fault

    def _live(self, rank: int, fn: Callable[[VirtualComm], T], results: list[Any]) -> None:
        try:
            self._await_turn(rank)
            with torch.no_grad():
                results[rank] = fn(VirtualComm(self, rank))
            if self._failure is None:
                self._seats[rank].done = True
                self._pass_turn(rank)
        except _Aborted:
            pass
        except BaseException as fault:
            self._fail(rank, fault)

    def _fail(self, rank: int, fault: BaseException) -> None:
        """Keep the first failure and wake everybody, so that they unwind."""
        if self._failure is None:
            self._failure = (rank, fault)
        for seat in self._seats:
            seat.turn.release()

    def _await_turn(self, rank: int) -> None:
        self._seats[rank].turn.acquire()
        self._stop_if_failed()

    def _stop_if_failed(self) -> None:
        if self._failure is not None:
            raise _Aborted

    def _pass_turn(self, rank: int) -> None:
        """Wake the next rank that can go on; if none can and some haven't ended, they wait for ever: fail."""
        for step in range(1, self.world + 1):
            seat = self._seats[(rank + step) % self.world]
            if seat.ready:
                seat.turn.release()
                return
        if not all(seat.done for seat in self._seats):
            words = [f"rank {rank} {seat.state}" for rank, seat in enumerate(self._seats[:16])]
            more = f"; and {self.world - 16} more" if self.world > 16 else ""
            self._fail(-1, RuntimeFault(f"ranks wait for one another: {'; '.join(words)}{more}"))

    def meet(self, rank: int, call: Call, finish: Callable[[list[Any]], list[Any]]) -> Any:
        """Wait until the whole group has entered the same collective; the last one computes everybody's result."""
        self._stop_if_failed()
        for member in call.group:
            other = self._seats[member].call
            if other is None or other.group != call.group:
                continue
            if (other.kind, other.like) != (call.kind, call.like):
                raise RuntimeFault(
                    f"ranks {member} and {rank} disagree over the group {call.group}: "
                    f"{other.kind} {other.like} and {call.kind} {call.like}"
                )
        self._seats[rank].call = call
        calls = [self._seats[member].call for member in call.group]
        payloads = [other.payload for other in calls if other is not None and other.group == call.group]
        if len(payloads) == len(call.group):
            for member, result in zip(call.group, finish(payloads), strict=True):
                self._seats[member].result, self._seats[member].call = result, None
        else:
            self._pass_turn(rank)
            self._await_turn(rank)
        result, self._seats[rank].result = self._seats[rank].result, None
        return result

    def post(self, rank: int, to: int, x: Tensor) -> None:
        """Leave a copy of `x` for rank `to`, which need not wait for it yet."""
        self._stop_if_failed()
        self._mail.setdefault((rank, to), deque()).append(x.clone())
        if self._seats[to].waits_for == rank:
            self._seats[to].waits_for = None

    def fetch(self, rank: int, sender: int) -> Tensor:
        """The oldest message of `sender` to `rank`, waiting for it if need be."""
        self._stop_if_failed()
        if not self._mail.get((sender, rank)):
            self._seats[rank].waits_for = sender
            self._pass_turn(rank)
            self._await_turn(rank)
        return self._mail[sender, rank].popleft()
