"""A plan for 64 ranks verified by one process: how long it takes, waits for weights, and how much memory it has.

    python -m tests.bench.bench_verify [--gigabytes 10] [--tp 8] [--pp 8] [--ep 8] [--resident 3] [--folder FOLDER]

The checkpoint is in the shape of DeepSeek-V3, in FP8; its files and the shards are dropped from the page cache.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.bench import ways
from tests.bench.checkpoint import make_deepseek


def verified(source: Path, out: Path, resident: int) -> dict[str, Any]:
    """What the command found, in a process of its own."""
    for folder in (source, out):
        ways.evict(folder)
    words = ["--reference", str(source), "--resident-layers", str(resident), "--json"]
    command = [sys.executable, "-m", "reshard", "verify-and-run", str(out), *words]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return found


def report(found: dict[str, Any]) -> None:
    """Print what was measured."""
    waited = found["seconds_waited"] + found["seconds_waited_reference"]
    memory = found["memory"]
    print(f"{'passed' if found['passed'] else 'FAILED'}: {found['ranks']} ranks, {found['tokens']} tokens")
    print(f"{found['seconds']:.1f} s; waited {waited:.1f} s for weights, {100 * waited / found['seconds']:.1f} %")
    print(f"{found['bytes_loaded'] / 1e9:.2f} GB of shards loaded in {found['seconds_loading']:.1f} s meanwhile")
    print(f"peak of the process {found['peak_memory'] / 1e9:.2f} GB; of the run {memory['measured'] / 1e9:.2f} GB, "
          f"predicted {memory['predicted']['total'] / 1e9:.2f} GB")  # fmt: skip


def main() -> None:
    """Make checkpoint and shards, verify them, print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=10.2)
    for axis in ("tp", "pp", "ep"):
        parser.add_argument(f"--{axis}", type=int, default=8)
    parser.add_argument("--resident", type=int, default=3, help="layers in memory at a time")
    parser.add_argument("--folder", type=Path, help="where to make the files; default: a temporary folder")
    options = parser.parse_args()
    from converter.verbs import convert

    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        source, out = Path(name) / "checkpoint", Path(name) / "out"
        make_deepseek(source, options.gigabytes)
        convert(source, out, tp=options.tp, pp=options.pp, ep=options.ep)
        report(verified(source, out, options.resident))


if __name__ == "__main__":
    main()
