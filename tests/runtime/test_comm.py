"""Collectives of one rank and of virtual ranks; test_distributed.py holds processes against them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.comm.comm import Comm, NoComm
from runtime.comm.virtual import VirtualWorld
from shard_plans.errors import CheckFailed, RuntimeFault


def rows(rank: int, count: int, width: int = 3) -> Tensor:
    return torch.arange(count * width, dtype=torch.float32).view(count, width) + 100 * rank


def everything(comm: Comm) -> list[Tensor]:
    """Every collective once, over the world and over halves of it, uneven and empty parts included."""
    world = tuple(range(comm.world))
    half = world[: comm.world // 2] if comm.rank < comm.world // 2 else world[comm.world // 2 :]
    out = [comm.all_reduce(rows(comm.rank, 2), world), comm.all_reduce(rows(comm.rank, 1).double(), half)]
    out += comm.all_gather(rows(comm.rank, comm.rank), world)
    out += comm.all_gather(rows(comm.rank, 0).bfloat16(), half)
    out += comm.all_to_all([rows(10 * comm.rank + to, (comm.rank + to) % 3) for to in world], world)
    out += comm.all_to_all([torch.tensor([comm.rank, to]) for to in half], half)
    out += comm.all_to_all([rows(0, 0) for _ in half], half)
    out.append(comm.broadcast(rows(7, 2) if comm.rank == 1 else None, 1, (2, 3), torch.float32))
    out.append(comm.share(rows(8, 2) if comm.rank == 1 else None, 1, (2, 3), torch.float32))
    if comm.rank > 0:
        out.append(comm.recv(comm.rank - 1, (2, 3), torch.float32))
    if comm.rank < comm.world - 1:
        comm.send(rows(comm.rank, 2), comm.rank + 1)
    comm.barrier()
    return out


def test_virtual_ranks_compute_what_the_words_say() -> None:
    results = VirtualWorld(4).run(everything)
    for rank, out in enumerate(results):
        half = (0, 1) if rank < 2 else (2, 3)
        expected = [sum((rows(r, 2) for r in range(4)), torch.zeros(2, 3))]
        expected.append(rows(half[0], 1).double() + rows(half[1], 1).double())
        expected += [rows(r, r) for r in range(4)] + [rows(0, 0).bfloat16()] * 2
        expected += [rows(10 * r + rank, (r + rank) % 3) for r in range(4)]
        expected += [torch.tensor([r, rank]) for r in half] + [rows(0, 0)] * 2 + [rows(7, 2), rows(8, 2)]
        expected += [rows(rank - 1, 2)] if rank else []
        assert len(out) == len(expected)
        assert all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(out, expected, strict=True))


def test_what_is_shared_lies_in_memory_once_and_is_not_the_roots_own() -> None:
    mine = rows(3, 2)
    shared = VirtualWorld(3).run(lambda c: c.share(mine if c.rank == 0 else None, 0, (2, 3), torch.float32))
    sent = VirtualWorld(3).run(lambda c: c.broadcast(mine if c.rank == 0 else None, 0, (2, 3), torch.float32))
    assert len({x.data_ptr() for x in shared}) == 1 and shared[0].data_ptr() != mine.data_ptr()
    assert len({x.data_ptr() for x in sent}) == 3


def test_one_rank_needs_nobody() -> None:
    comm, x = NoComm(), rows(0, 2)
    assert comm.all_reduce(x, (0,)) is x and comm.all_gather(x, (0,)) == [x] and comm.all_to_all([x], (0,)) == [x]
    assert comm.broadcast(x, 0, (2, 3), torch.float32) is x
    comm.barrier()
    for call in (lambda: comm.send(x, 1), lambda: comm.recv(1, (2,), torch.float32)):
        with pytest.raises(RuntimeFault, match="one rank only"):
            call()


def test_exactly_one_rank_computes_at_a_time() -> None:
    running, most, lock = 0, 0, threading.Lock()

    def rank(comm: Comm) -> None:
        nonlocal running, most
        for _ in range(5):
            with lock:
                running += 1
                most = max(most, running)
            time.sleep(0.001)
            with lock:
                running -= 1
            comm.barrier()

    VirtualWorld(6).run(rank)
    assert most == 1


def test_sums_are_taken_in_rank_order_and_not_shared() -> None:
    parts = [torch.tensor([x]) for x in (1e8, 1.0, -1e8, 1.0)]

    def rank(comm: Comm) -> tuple[float, float]:
        total = comm.all_reduce(parts[comm.rank], (0, 1, 2, 3))
        back = comm.all_reduce(parts[comm.rank], (3, 2, 1, 0))
        total_value = float(total)
        total += comm.rank  # must not reach the others
        comm.barrier()
        assert float(total) == total_value + comm.rank
        return total_value, float(back)

    assert VirtualWorld(4).run(rank) == [(1.0, 0.0)] * 4


def test_gradients_are_off() -> None:
    assert VirtualWorld(2).run(lambda comm: torch.is_grad_enabled()) == [False, False]


def test_a_message_is_a_copy_and_may_wait() -> None:
    def rank(comm: Comm) -> Tensor | None:
        if comm.rank:
            return comm.recv(0, (2,), torch.float32) + comm.recv(0, (2,), torch.float32)
        x = torch.ones(2)
        comm.send(x, 1)
        x += 5
        comm.send(x, 1)
        x += 5
        return None

    result = VirtualWorld(2).run(rank)[1]
    assert result is not None and result.tolist() == [7.0, 7.0]


def raises(world: int, fn: Callable[[Comm], Any], match: str, error: type[Exception] = RuntimeFault) -> None:
    start = time.monotonic()
    with pytest.raises(error, match=match):
        VirtualWorld(world).run(fn)
    assert time.monotonic() - start < 60  # it ends, and doesn't wait for ranks that won't come


def test_a_failure_ends_all_ranks_and_names_its_own() -> None:
    unwound = []

    def rank(comm: Comm) -> None:
        try:
            if comm.rank == 2:
                raise CheckFailed("norm is off")
            comm.barrier()
        finally:
            unwound.append(comm.rank)

    raises(4, rank, "^rank 2: norm is off$", CheckFailed)
    assert sorted(unwound) == [0, 1, 2]  # rank 3 hadn't begun
    raises(3, lambda comm: 1 / (1 - comm.rank), "^rank 1: ZeroDivisionError: division by zero$")


def only_rank_0(comm: Comm) -> None:
    if comm.rank == 0:
        comm.barrier()


def test_ranks_that_wait_for_ever_are_named() -> None:
    raises(2, only_rank_0, r"rank 0 is in barrier over \(0, 1\); rank 1 has ended")
    raises(
        2, lambda comm: comm.recv(1 - comm.rank, (1,), torch.float32), "rank 0 waits for a message of rank 1; rank 1"
    )

    def crossed(comm: Comm) -> None:
        comm.all_reduce(torch.ones(1), (0, 1, 2) if comm.rank else (0, 1))

    raises(3, crossed, r"rank 0 is in all_reduce over \(0, 1\); rank 1 is in all_reduce over \(0, 1, 2\)")
    raises(40, only_rank_0, "and 24 more")


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda c: c.all_reduce(torch.ones(1 + c.rank), (0, 1)), r"disagree over the group \(0, 1\): .*\(1,\).*\(2,\)"),
        (lambda c: c.all_gather(torch.ones(1, 2 + c.rank), (0, 1)), "disagree"),
        (lambda c: c.all_gather(torch.ones(1), (0, 1)) if c.rank else c.barrier(), "barrier .*all_gather"),
        (lambda c: c.broadcast(torch.ones(1), c.rank, (1,), torch.float32), "disagree"),
        (lambda c: c.broadcast(None, 0, (1,), torch.float32), "root 0 is rank 0, which passed no tensor"),
        (lambda c: c.broadcast(torch.ones(2), 0, (1,), torch.float32), r"rank 0 passed \(2,\) torch.float32, expected"),
        (lambda c: c.all_reduce(torch.ones(1), (1 - c.rank,)), r"rank 0 called it over the group \(1,\)"),
        (lambda c: c.all_reduce(torch.ones(1), (0, 0, 1)), "each rank once"),
        (lambda c: c.all_reduce(torch.ones(1), (0, 1, 2)), "ranks 0 to 1 only"),
        (lambda c: c.all_to_all([torch.ones(1)], (0, 1)), "passed 1 parts for 2 members"),
        (lambda c: c.all_reduce(torch.ones(1).to(torch.float8_e4m3fn), (0, 1)), "float8_e4m3fn can't be sent"),
        (lambda c: c.send(torch.ones(1), c.rank), "rank 0 can't send to rank 0"),
        (lambda c: c.recv(2, (1,), torch.float32), "can't receive from rank 2"),
        (
            lambda c: c.recv(0, (2,), torch.float64) if c.rank else c.send(torch.ones(2), 1),
            r"rank 0 sent rank 1 \(2,\) torch.float32, expected \(2,\) torch.float64",
        ),
    ],
)
def test_calls_that_do_not_match_are_refused(fn: Callable[[Comm], Any], message: str) -> None:
    raises(2, fn, message)


def test_a_world_can_run_again_after_a_failure() -> None:
    world = VirtualWorld(3)
    with pytest.raises(RuntimeFault, match="rank 0: KeyError"):
        world.run(lambda comm: {"a": 1}[str(comm.rank)])
    assert world.run(lambda comm: float(comm.all_reduce(torch.ones(1), (0, 1, 2)))) == [3.0] * 3
    with pytest.raises(RuntimeFault, match="at least one"):
        VirtualWorld(0)
