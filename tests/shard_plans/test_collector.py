"""The collector of cycles is still while documents are read, and on again afterwards, whatever happens."""

from __future__ import annotations

import gc
import threading

import pytest

from shard_plans.checkpoints.collector import undisturbed


@undisturbed
def state(fault: Exception | None = None) -> bool:
    if fault is not None:
        raise fault
    return gc.isenabled()


def test_it_is_off_meanwhile_and_on_again() -> None:
    assert gc.isenabled()
    assert not state()
    assert gc.isenabled()


def test_it_is_on_again_after_a_fault() -> None:
    with pytest.raises(ValueError, match="damaged"):
        state(ValueError("damaged"))
    assert gc.isenabled()


def test_it_stays_off_where_it_was_off() -> None:
    gc.disable()
    try:
        state()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_it_is_on_again_after_threads_that_overlap() -> None:
    barrier = threading.Barrier(4)

    @undisturbed
    def together() -> None:
        barrier.wait(10)

    threads = [threading.Thread(target=together) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert gc.isenabled()
