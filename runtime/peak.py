"""The most memory that this process held, and by how much it grew since some moment."""

from __future__ import annotations

import ctypes
import re
import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

from runtime.comm.devices import module

M_ARENA_MAX = -8
"""A parameter of mallopt (malloc.h of glibc)."""
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_memory(device: torch.device) -> int:
    """Bytes: of tensors on an accelerator, or resident ones of the process, its libraries included, on a CPU."""
    if device.type != "cpu":
        found = getattr(module(device.type), "max_memory_allocated", None)
        return int(found(device)) if found is not None else 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def one_arena() -> None:
    """Have all threads allocate from one pool, where the C library is glibc.

    Virtual ranks compute one at a time. With a pool for each, every one keeps memory that another could have used.
    """
    call = getattr(ctypes.CDLL(None), "mallopt", None)
    if call is not None:
        call(M_ARENA_MAX, 1)


class Growth:
    """The most by which memory grew since this was made."""

    def __init__(self, device: torch.device) -> None:
        """Forgets an earlier peak, where the system lets it."""
        self._device = device
        if device.type != "cpu":
            with suppress(AttributeError):  # not every vendor's library has it
                module(device.type).reset_peak_memory_stats(device)
            allocated = getattr(module(device.type), "memory_allocated", None)
            self.baseline = int(allocated(device)) if allocated is not None else 0
            return
        with suppress(OSError):
            CLEAR.write_text("5")  # the peak of resident memory, of this process alone
        self.baseline = _status("VmRSS")
        """Bytes that were held then."""
        self._before = _status("VmHWM")

    def most(self) -> int | None:
        """Bytes; None where the system doesn't say, or an earlier peak hides it."""
        if self._device.type != "cpu":
            return max(0, peak_memory(self._device) - self.baseline)
        peak = _status("VmHWM")
        hidden = peak <= self._before and self._before > 1.05 * self.baseline
        return None if not peak or hidden else peak - self.baseline


def _status(field: str) -> int:
    """Bytes of a field of /proc/self/status; 0 where there is none."""
    with suppress(OSError):
        found = re.search(rf"^{field}:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else 0
    return 0
