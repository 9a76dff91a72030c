"""The collector of cycles is still while documents are read, and on again afterwards, whatever happens."""

from __future__ import annotations

import gc
import threading

import pytest

from shard_plans.checkpoints import collector
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


class Interrupted:
    """The collector, of a thread that is interrupted between the look whether it is on and the word to stop."""

    def __init__(self, until: threading.Event, looked: threading.Event) -> None:
        self._until, self._looked = until, looked
        self.enable, self.disable = gc.enable, gc.disable

    def isenabled(self) -> bool:
        """As gc says, after a while where it is off."""
        on = gc.isenabled()
        if not on:  # another thread holds it still
            self._looked.set()
            self._until.wait(2)
        return on


def test_it_is_on_again_after_threads_that_meet_at_the_border(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, looked, ended = threading.Event(), threading.Event(), threading.Event()
    monkeypatch.setattr(collector, "gc", Interrupted(ended, looked))

    @undisturbed
    def first() -> None:
        begun.set()
        looked.wait(0.5)

    def whole() -> None:
        first()
        ended.set()

    threads = [threading.Thread(target=whole), threading.Thread(target=state)]
    try:
        threads[0].start()
        begun.wait(10)
        threads[1].start()
        for thread in threads:
            thread.join()
        assert gc.isenabled()
    finally:
        gc.enable()
