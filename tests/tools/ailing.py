"""The command `reshard` in which one rank falls ill: `python -m tests.tools.ailing HOW RANK LAYER OPERATOR ARGS...`."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

from pytest import MonkeyPatch

from runtime.alive.lookout import SILENCE
from runtime.alive.pulse import Pulse
from runtime.alive.watched import WatchedComm
from runtime.comm.comm import Comm

HOW: dict[str, Callable[[], None]] = {
    "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": lambda: time.sleep(3600),
    "slow": lambda: time.sleep(SILENCE + 3),
}


def fall_ill(patch: MonkeyPatch, how: str, rank: int, layer: int, operator: str) -> None:
    """Let `rank` do so once, at the beginning of an operator."""
    begin, make, pulses = Pulse.begin, WatchedComm.__init__, list[Pulse]()

    def made(self: WatchedComm, comm: Comm, pulse: Pulse) -> None:
        make(self, comm, pulse)
        if comm.rank == rank:
            pulses.append(pulse)

    def begun(self: Pulse, name: str) -> None:
        begin(self, name)
        if self in pulses and (self.place, name) == (f"layer {layer}", operator):
            pulses.clear()
            HOW[how]()

    patch.setattr(WatchedComm, "__init__", made)
    patch.setattr(Pulse, "begin", begun)


if __name__ == "__main__":
    import reshard

    how, rank, layer, operator = sys.argv[1:5]
    del sys.argv[1:5]
    fall_ill(MonkeyPatch(), how, int(rank), int(layer), operator)
    reshard.main(prog_name="reshard")
