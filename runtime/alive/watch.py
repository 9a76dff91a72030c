"""The watch: a thread that tells other processes how this one is, sees how they are, and ends the run if need be."""

from __future__ import annotations

import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

from runtime.alive.lookout import SILENCE, Lookout
from runtime.alive.pulse import Pulse
from runtime.alive.signs import Sign, StoreBoard
from shard_plans.errors import OtherRankStopped, ReshardError, RuntimeFault

INTERVAL = 0.5
"""Seconds between two signs."""
ENDING = 2.5
"""Seconds without a sign that count as death once it is known that some rank is gone, ..."""
LAST_LOOK = 6.0
"""... and how long is looked for it."""

Stop = Callable[[ReshardError, bool], None]
"""Ends the run with a fault; True: this process is the one that tells the user."""


class Watch:
    """Over the pulses of this process's ranks, and with a board over all processes. Use `with`; one at a time.

    Under torchrun a rank that dies leaves the others in a collective that may not end, and torchrun ends them by a
    SIGTERM; the watch takes that signal, finds which rank it was, and says so before it stops.
    """

    def __init__(self, patience: float, stop: Stop, board: StoreBoard | None = None) -> None:
        """`patience`: see Lookout. `stop` is called in the watch's thread."""
        self._lookout, self._stop, self._board = Lookout(patience), stop, board
        self._pulses: list[tuple[str, Pulse]] = []
        self._number = 0
        self._fault: str | None = None
        self._over = threading.Event()
        self._until: float | None = None  # some rank is known to be gone: when to give up looking which
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._kept: tuple[Any, int] | None = None

    def add(self, who: str, pulse: Pulse) -> Pulse:
        """Watch one more pulse; the one that last went on says where the process is."""
        self._pulses.append((who, pulse))
        return pulse

    def tell(self, fault: ReshardError) -> None:
        """Let the other processes know that this one stops, and why."""
        self._fault = str(fault)
        self._over.set()
        self._post(ended=True)

    def blame(self) -> None:
        """A collective broke: give the watch time to find which rank is gone; it then ends the process."""
        self._until = time.monotonic() + LAST_LOOK
        self._over.wait(LAST_LOOK + SILENCE)

    def __enter__(self) -> Watch:
        if self._board is not None and threading.current_thread() is threading.main_thread():
            self._wake.setblocking(False)
            kept = signal.signal(signal.SIGTERM, lambda *_: None)  # noticed by the thread, where this one may hang
            self._kept = kept, signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._fault is None:
            self._fault = str(error) or type(error).__name__
        if self._kept is not None:
            signal.set_wakeup_fd(self._kept[1])
            signal.signal(signal.SIGTERM, self._kept[0])
        self._over.set()
        self._wake.send(b"\0")  # any byte but a signal's number: the thread need not sleep to the end
        self._thread.join(SILENCE)
        self._post(ended=True)
        self._wake.close()
        self._woken.close()

    def sign(self, ended: bool = False) -> Sign:
        """What this process says of itself."""
        self._number += 1
        if not self._pulses:
            return Sign(self._number, ended=ended, fault=self._fault)
        who, pulse = max(self._pulses, key=lambda named: named[1].moved)
        still = round(time.monotonic() - pulse.moved, 1)
        return Sign(self._number, who, pulse.where, pulse.waits, still, ended, self._fault)

    def _run(self) -> None:
        gone: str | None = None
        answered = time.monotonic()
        while not self._over.is_set():
            if select.select([self._woken], [], [], INTERVAL)[0] and signal.SIGTERM in self._woken.recv(64):
                self._until = self._until or time.monotonic() + LAST_LOOK
            now = time.monotonic()
            try:
                fault = self._look()
                answered = now
            except RuntimeError as error:  # the store is gone, and torchrun with it
                gone = str(error)
                fault = None
            if fault is None and now - answered > SILENCE:
                fault = RuntimeFault(f"torchrun's store doesn't answer any more: {gone}")
            if fault is None and self._until is not None and now > self._until:
                fault = RuntimeFault("told to stop (SIGTERM), or a link broke, though every rank gives signs of life")
            if fault is not None and not self._over.is_set():
                self._stop(fault, self._board is None or self._claims(fault))
                return

    def _look(self) -> ReshardError | None:
        mine = self.sign()
        if self._board is None:
            return self._lookout.judge([mine])
        self._board.post(mine)
        return self._lookout.judge(self._board.read(), SILENCE if self._until is None else ENDING)

    def _claims(self, fault: ReshardError) -> bool:
        """Whether nobody has told the user yet: a rank that stops by itself does."""
        return not isinstance(fault, OtherRankStopped) and self._board is not None and self._board.claim()

    def _post(self, ended: bool) -> None:
        if self._board is None:
            return
        with suppress(RuntimeError):  # nobody is left to read it
            self._board.post(self.sign(ended))
