"""How fast shards come onto the device, and whether a model larger than what may lie there streams through."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from converter.verbs import convert
from runtime.comm.devices import open_device, synchronize
from runtime.loading.loader import Loader, LoadOptions
from runtime.request import RunOptions
from runtime.run import verify_and_run
from shard_plans.documents.manifest import read_manifest
from tests.bench import ways
from tests.bench.checkpoint import make_deepseek
from tests.gpu.part import Part, Setting
from tests.tools.sharded import failed

TOKENS, ON_CPU = 256, 8
"""Of the pass that streams; more of them make it compute longer than it reads, and a CPU for minutes."""
Load = Callable[[Path, torch.device], None]


def loader(out: Path, device: torch.device, check: bool = True) -> None:
    """Every rank takes and releases each of its layers, two of which may be in memory."""
    root = read_manifest(out)
    with Loader(out, root, range(len(root.ranks)), 1 << 30, LoadOptions(device, check, 2)) as found:
        for section in found.sections:
            for rank in range(len(root.ranks)):
                found.get(rank, section)
                found.release(rank, section)


def unchecked(out: Path, device: torch.device) -> None:
    """The same without hashes."""
    loader(out, device, check=False)


def safetensors(out: Path, device: torch.device) -> None:
    """load_file, one file after the other."""
    for path in sorted(out.glob("*.safetensors")):
        for tensor in load_file(path, device=str(device)).values():
            tensor.flatten().view(torch.uint8)[::4096].sum()  # each page, or a CPU would read nothing


WAYS: dict[str, Load] = {"loader": loader, "loader, no hashes": unchecked, "safetensors load_file": safetensors}


def run(setting: Setting) -> Part:
    """Each way once from cold files, then a pass over all 64 ranks that streams; the figures aren't judged."""
    part, device = Part("loading", len(WAYS) + 1), open_device(setting.device)
    source, out = setting.folder / "large", setting.folder / "shards"
    make_deepseek(source, setting.gigabytes)
    convert(source, out, tp=8, ep=8)
    size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    part.figures["GB"] = round(size / 1e9, 2)
    for name, load in WAYS.items():
        ways.evict(out)
        began = time.monotonic()
        load(out, device)
        synchronize(device)
        part.figures[f"{name}, GB/s"] = round(size / (time.monotonic() - began) / 1e9, 2)
        part.done += 1
    shutil.rmtree(out)
    convert(source, out, tp=8, dp=8, ep=64)
    ids = ",".join(str(3 + number % 200) for number in range(ON_CPU if device.type == "cpu" else TOKENS))
    found = verify_and_run(RunOptions(out, device=setting.device, input_ids=ids, compute="bfloat16"))
    part.done += 1
    if failed(found):
        part.failures.append(f"the streamed pass: failed: {', '.join(sorted(failed(found)))}")
    part.figures |= {f"64 ranks, {name}": value for name, value in streamed(found.figures).items()}
    return part


def streamed(figures: dict[str, Any]) -> dict[str, Any]:
    """What a pass says of its loading."""
    names = ("seconds", "seconds_waited", "seconds_computing", "bytes_read", "peak_memory")
    return {name: figures[name] for name in names if name in figures}
