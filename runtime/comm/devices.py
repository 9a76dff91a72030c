"""Accelerators by name: how to find them, which collective library they use. The only place that knows vendors."""

from __future__ import annotations

import importlib
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from converter.streams.buffers import PAGE, aligned
from shard_plans.errors import RuntimeFault


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of device."""

    name: str
    """The name in torch.device and of the module under torch."""
    backend: str
    """torch.distributed's collective backend."""
    plugin: str | None = None
    """The package that adds it to torch."""


KINDS = {
    kind.name: kind
    for kind in (
        Kind("cuda", "nccl"),
        Kind("musa", "mccl", "torch_musa"),
        Kind("npu", "hccl", "torch_npu"),
        Kind("xpu", "xccl"),
        Kind("cpu", "gloo"),
    )
}
"""ROCm cards are `cuda` too: torch names them so, and RCCL `nccl`."""


def available() -> tuple[str, ...]:
    """Names of the kinds that this machine and this torch have, cpu last."""
    return tuple(name for name in KINDS if _count(name))


def open_device(name: str = "cpu", local_rank: int | None = None) -> torch.device:
    """The device `cuda`, `cuda:1`, ...; ranks of one machine take one card each, by torchrun's LOCAL_RANK.

    Makes it current, and float32 products exact (no TF32). Raises RuntimeFault for a kind that is unknown or not there.
    """
    kind, colon, number = name.partition(":")
    if kind not in KINDS:
        raise RuntimeFault(f"no device {name}; known are {', '.join(KINDS)}, and this machine has {_present()}")
    count = _count(kind)
    if not count:
        needs = KINDS[kind].plugin
        hint = f" (the package {needs} isn't installed)" if needs and not importlib.util.find_spec(needs) else ""
        raise RuntimeFault(f"no device {name} here{hint}; this machine has {_present()}")
    torch.set_float32_matmul_precision("highest")
    if kind == "cpu":
        return torch.device("cpu")
    if colon and not (number.isascii() and number.isdigit()):
        raise RuntimeFault(f"device {name}: {number!r} isn't a card's number")
    if local_rank is None:
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    index = int(number) if colon else local_rank
    if index >= count:
        raise RuntimeFault(f"device {kind}:{index} doesn't exist, this machine has {count} {kind} devices")
    module(kind).set_device(index)
    return torch.device(kind, index)


def backend_of(device: torch.device) -> str:
    """The collective backend for `device`."""
    if device.type not in KINDS:
        raise RuntimeFault(f"no collective backend is known for {device.type}; name one of torch's with --backend")
    return KINDS[device.type].backend


def synchronize(device: torch.device) -> None:
    """Wait until everything that was queued on `device` has run."""
    if device.type != "cpu":
        module(device.type).synchronize(device)


def describe(device: torch.device) -> str:
    """The device's own name, where its library tells it."""
    found = getattr(module(device.type), "get_device_name", None) if device.type != "cpu" else None
    return f"{device} ({found(device)})" if found is not None else str(device)


def free_bytes(device: torch.device) -> int:
    """Bytes that this process may still take on `device`; 0 where its library doesn't say.

    On a CPU: what the kernel calls available, at most what its control group leaves.
    """
    if device.type != "cpu":
        found = getattr(module(device.type), "mem_get_info", None)
        return int(found(device)[0]) if found is not None else 0
    words = _words("/proc/meminfo").partition("MemAvailable:")[2].split()
    limits = [int(words[0]) * 1024] if words and words[0].isdigit() else []
    most, used = (_words(f"/sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    if most.isdigit() and used.isdigit():
        limits.append(max(0, int(most) - int(used)))
    return min(limits, default=0)


class SideStream:
    """Copies between pinned host memory and a device, beside what is computed; for one thread. A CPU copies at once."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, None
        if device.type != "cpu":
            module(device.type).set_device(device.index or 0)  # a thread has a current device of its own
            self._stream = module(device.type).Stream(device=device)

    def pinned(self, size: int) -> Tensor:
        """Host memory [size] uint8 that begins at a page, page-locked where the device has a use for that."""
        if self._stream is None:
            return torch.from_numpy(aligned(size))
        flat = torch.empty(size + PAGE, dtype=torch.uint8, pin_memory=True)
        start = -flat.data_ptr() % PAGE
        return flat[start : start + size]

    def copy(self, target: Tensor, source: Tensor) -> Any:
        """Begin to copy, behind what was queued to be computed: the target's memory may still be read by that.

        Returns what `wait` waits for.
        """
        if self._stream is None:
            target.copy_(source)
            return None
        library = module(self._device.type)
        self._stream.wait_stream(library.current_stream(self._device))
        with library.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = library.Event()
            event.record(self._stream)
        return event

    def wait(self, event: Any) -> None:
        """Return once the copy is done; at once for None."""
        if event is not None:
            event.synchronize()


def module(kind: str) -> Any:
    """torch.cuda, torch.musa, ...: the vendor's functions under torch's common names."""
    return getattr(torch, kind)


def _count(kind: str) -> int:
    if kind == "cpu":
        return 1
    plugin = KINDS[kind].plugin
    if plugin is not None:
        if importlib.util.find_spec(plugin) is None:
            return 0
        try:
            importlib.import_module(plugin)
        except Exception as fault:  # a vendor's package may fail in any way without its driver
            raise RuntimeFault(f"the package {plugin} can't be loaded: {fault}") from fault
    functions = getattr(torch, kind, None)
    if functions is None or not functions.is_available():
        return 0
    return int(functions.device_count())


def _words(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _present() -> str:
    return ", ".join(f"{name} ({_count(name)})" if name != "cpu" else name for name in available())
