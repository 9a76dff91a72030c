"""The most memory that this process held so far."""

from __future__ import annotations

import resource
import sys

import torch

from runtime.comm.devices import module


def peak_memory(device: torch.device) -> int:
    """Bytes: of tensors on an accelerator, or resident ones of the process, its libraries included, on a CPU."""
    if device.type != "cpu":
        found = getattr(module(device.type), "max_memory_allocated", None)
        return int(found(device)) if found is not None else 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
