"""How fast an output is loaded into memory, layer by layer, beside other ways to read the same cold files.

    python -m tests.bench.bench_loading [--gigabytes 8] [--rounds 5] [--resident 2] [--peer PYTHON] [--folder FOLDER]

Each way runs in a process of its own, from files that were dropped from the page cache; all of them in turn, in one
run. The checkpoint is in the shape of DeepSeek-V3, its plan tp 8, ep 8. `--peer` names an interpreter that has
runai-model-streamer, torch and reshard's other packages; without one that way is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from tests.bench import ways
from tests.bench.bench_convert import peak
from tests.bench.checkpoint import make_deepseek

CAP = 256 << 20
"""Bytes of memory that the streamer may take."""
WARM = 5 << 28
"""Bytes of memory that every way finds at hand: more than any of them takes."""
BASE = "loader"
IMPORTED = ("runtime.loading.loader", "safetensors.torch", "runai_model_streamer")
Load = Callable[[Path, argparse.Namespace], None]


def loader(out: Path, options: argparse.Namespace, check: bool = True) -> None:
    """Every rank takes and releases each of its layers."""
    import torch

    from runtime.loading.loader import Loader, LoadOptions
    from shard_plans.documents.manifest import read_manifest

    root = read_manifest(out)
    load = LoadOptions(torch.device("cpu"), check, options.resident, threads=options.threads)
    with Loader(out, root, range(len(root.ranks)), sys.maxsize, load) as found:
        for section in found.sections:
            for rank in range(len(root.ranks)):
                found.get(rank, section)
                found.release(rank, section)


def unchecked(out: Path, options: argparse.Namespace) -> None:
    """The same without hashes."""
    loader(out, options, check=False)


def safetensors(out: Path, options: argparse.Namespace) -> None:
    """load_file, one file after the other; a byte of each page is touched, or nothing would be read."""
    import torch
    from safetensors.torch import load_file

    for path in shards(out):
        for tensor in load_file(path).values():
            tensor.flatten().view(torch.uint8)[::4096].sum()


def streamer(out: Path, options: argparse.Namespace, owned: bool = True) -> None:
    """runai-model-streamer as it chooses to read, in bounded memory; each tensor is the caller's."""
    os.environ["RUNAI_STREAMER_MEMORY_LIMIT"] = str(CAP)
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as stream:
        stream.stream_files([str(path) for path in shards(out)], owned=owned)
        for _ in stream.get_tensors():
            pass


def borrowed(out: Path, options: argparse.Namespace) -> None:
    """The same with tensors that look into buffers which it fills again."""
    streamer(out, options, owned=False)


def raw(out: Path, options: argparse.Namespace) -> None:
    """Direct reads into two buffers, which nobody looks at."""
    ways.raw_read(out, 2)


WAYS: dict[str, Load] = {
    BASE: loader, "loader, no hashes": unchecked, "safetensors load_file": safetensors,
    "runai, owned tensors": streamer, "runai, reused buffers": borrowed, "raw direct read": raw,
}  # fmt: skip


def shards(out: Path) -> list[Path]:
    """The output's weight files."""
    return sorted(out.glob("*.safetensors"))


def child(out: Path, options: argparse.Namespace) -> None:
    """One way in this process: prints its seconds and the most memory that it took."""
    import torch

    for module in IMPORTED:  # what takes long to import isn't timed
        with suppress(ImportError):
            import_module(module)
    torch.set_num_threads(1)
    ways.evict(out)
    ways.warm(WARM)
    started = time.monotonic()
    WAYS[options.child](out, options)
    print(json.dumps({"seconds": time.monotonic() - started, "peak": peak()}))


def measured(way: str, out: Path, options: argparse.Namespace) -> dict[str, float] | None:
    """A way in a process of its own; None where its package isn't there."""
    python = options.peer if "runai" in way else sys.executable
    if python is None or (
        "runai" in way and subprocess.run([python, "-c", "import runai_model_streamer"], capture_output=True).returncode
    ):
        return None
    words = ["--resident", str(options.resident), "--threads", str(options.threads), "--child", way]
    command = [str(python), "-m", "tests.bench.bench_loading", *words, "--folder", str(out)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def report(out: Path, rounds: list[dict[str, dict[str, float]]]) -> None:
    """Medians, and how many times as fast the loader is: the median of what was measured in the same round."""
    size = sum(path.stat().st_size for path in shards(out))
    print(f"{size / 1e9:.2f} GB in {len(shards(out))} files, medians of {len(rounds)} rounds")
    for way in WAYS:
        each = [found[way]["seconds"] for found in rounds if way in found]
        if not each:
            print(f"{way:24} not measured: runai-model-streamer isn't importable, name an interpreter with --peer")
            continue
        times = statistics.median(found[way]["seconds"] / found[BASE]["seconds"] for found in rounds)
        middle, most = statistics.median(each), max(found[way]["peak"] for found in rounds)
        print(f"{way:24} {middle:6.2f} s ({min(each):.2f} to {max(each):.2f}) {size / middle / 1e9:5.2f} GB/s, "
              f"peak {most / 2**20:5.0f} MiB; the loader is {times:.2f} times as fast")  # fmt: skip


def main() -> None:
    """Make the output, measure all ways in turn, print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--resident", type=int, default=2, help="layers in memory at a time")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--peer", type=Path, help="an interpreter that has runai-model-streamer")
    parser.add_argument("--folder", type=Path, help="where to make the files; default: a temporary folder")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(options.folder, options)
    from converter.verbs import convert

    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        source, out = Path(name) / "checkpoint", Path(name) / "out"
        make_deepseek(source, options.gigabytes)
        convert(source, out, tp=8, ep=8)
        rounds = []
        for number in range(options.rounds):
            found = {way: taken for way in WAYS if (taken := measured(way, out, options)) is not None}
            rounds.append(found)
            print(f"round {number}: {found}", file=sys.stderr)
        report(out, rounds)


if __name__ == "__main__":
    main()
