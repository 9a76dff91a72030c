"""Time and peak memory of convert and check, against raw direct I/O of the same bytes.

    python -m tests.bench.bench_convert [--gigabytes 8] [--rounds 5] [--plain] [--kimi] [--layout NAME]
        [--folder FOLDER]

All are timed in turn, in one run, from files that were dropped from the page cache, fsync included. The checkpoint is
in the shape of DeepSeek-V3; with --kimi it is the first two layers of Kimi K3 in full size: 24 GB, in the checkpoint
holes for the most part, and once on the disk.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.bench import ways
from tests.bench.checkpoint import HIDDEN, PUBLISHED, make_deepseek, make_kimi

WARM = 1 << 28
"""Bytes of memory that convert and check find at hand, as the raw ways do that need none."""


def child(source: Path, out: Path, tp: int, ep: int, workers: int, layout: str) -> None:
    """Convert in this process and print its result and peak memory."""
    from converter.convert import convert
    from shard_plans.checkpoints.checkpoint import open_checkpoint
    from shard_plans.documents.plan import Plan, PlanSource
    from shard_plans.families.binding import bind
    from shard_plans.families.family import load_family
    from shard_plans.layouts.registry import find_layout, lay_out_plan
    from shard_plans.placement.experts import ExpertPlacement, contiguous
    from shard_plans.placement.grid import make_grid

    checkpoint = open_checkpoint(source)
    binding = bind(checkpoint, load_family(checkpoint.config))
    whose = PlanSource(binding.family.name, checkpoint.fingerprint, len(checkpoint), checkpoint.total_bytes)
    stages = ((0, len(binding.model.layers)),)
    plan = Plan(whose, make_grid(tp=tp, ep=ep), stages, ExpertPlacement(contiguous(binding.model.sizes["experts"], ep)))
    plan = find_layout(layout).chosen(binding, plan)
    ways.warm(WARM)
    result = convert(checkpoint, binding, plan, lay_out_plan(binding, plan), out, workers)
    print(json.dumps({"seconds": result.seconds, "peak": peak(), "written": result.bytes_written}))


def child_check(out: Path) -> None:
    """Check in this process and print how long it took, and its peak memory."""
    from converter.check import check

    ways.warm(WARM)
    started = time.monotonic()
    if not check(out).passed:
        raise SystemExit("the output doesn't pass its check")
    print(json.dumps({"seconds": time.monotonic() - started, "peak": peak()}))


def peak() -> int:
    """The most bytes that this process had resident."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def measured(options: argparse.Namespace, *folders: Path) -> dict[str, float]:
    """One conversion of the first folder into the second, or a check of the only one, in a process of its own."""
    sizes = ["--tp", str(options.tp), "--ep", str(options.ep), "--workers", str(options.workers)]
    sizes += ["--layout", options.layout]
    command = [sys.executable, "-m", "tests.bench.bench_convert", *sizes, "--child", *map(str, folders)]
    done: dict[str, float] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return done


def one_round(source: Path, folder: Path, options: argparse.Namespace, last: bool) -> dict[str, float]:
    """Seconds of each way, one after the other, from files that are on the disk alone; and peaks, and bytes written."""
    found: dict[str, float] = {}
    ways.evict(source)
    found["raw direct copy"] = ways.raw_copy(source, folder / "copy", 2)
    shutil.rmtree(folder / "copy")
    if options.plain:
        ways.evict(source)
        found["plain file copy"] = ways.plain_copy(source, folder / "copy")
        shutil.rmtree(folder / "copy")
    ways.evict(source)
    found |= {f"convert {key}": value for key, value in measured(options, source, folder / "out").items()}
    ways.evict(folder / "out")
    found["raw direct read"] = ways.raw_read(folder / "out", 2)
    ways.evict(folder / "out")
    found |= {f"check {key}": value for key, value in measured(options, folder / "out").items()}
    if last and options.plain:
        ways.evict(source)
        found["load all, then save_file"] = ways.load_all_then_save(source, folder / "out", folder / "plain")
        shutil.rmtree(folder / "plain")
    shutil.rmtree(folder / "out")
    return found


def report(size: int, rounds: list[dict[str, float]], options: argparse.Namespace) -> None:
    """Print medians, ratios of what was measured in the same round, and peaks."""

    def middle(name: str) -> float:
        return statistics.median(found[name] for found in rounds if name in found)

    def ratio(raw: str, ours: str) -> float:
        return statistics.median(found[raw] / found[ours] for found in rounds)

    def most(name: str) -> float:
        return max(found[name] for found in rounds) / 2**20

    written = rounds[0]["convert written"]
    print(f"{size / 1e9:.2f} GB, {written / 1e9:.2f} GB written, layout {options.layout}, tp {options.tp}, "
          f"ep {options.ep}, {options.workers} workers, medians of {len(rounds)} rounds")  # fmt: skip
    for name in rounds[-1]:
        if name.endswith((" peak", " written")):
            continue
        way, each = name.removesuffix(" seconds"), [found[name] for found in rounds if name in found]
        moved = written if way in ("check", "raw direct read") else size
        took = f"{middle(name):6.2f} s ({min(each):.2f} to {max(each):.2f})"
        print(f"{way:26} {took}  {moved / middle(name) / 1e9:5.2f} GB/s")
    copy = ratio("raw direct copy", "convert seconds")
    read = ratio("raw direct read", "check seconds")
    bytewise = copy * (size + written) / 2 / size
    print(f"convert at {copy:.2f} of a raw direct copy ({bytewise:.2f} by bytes moved)", end=", ")
    print(f"peak {most('convert peak'):.0f} MiB")
    print(f"check at {read:.2f} of a raw read, peak {most('check peak'):.0f} MiB")
    if options.plain:
        times = middle("load all, then save_file") / middle("convert seconds")
        print(f"{times:.1f} times as fast as load all, save_file")


def main() -> None:
    """Make the checkpoint, measure all ways in turn, print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--ep", type=int, default=8)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--folder", type=Path, help="where to make the files; default: a temporary folder")
    parser.add_argument("--plain", action="store_true", help="also copy plainly, and load all and save_file at the end")
    parser.add_argument("--kimi", action="store_true", help="two layers of Kimi K3 instead")
    parser.add_argument("--layout", default="reshard", help="as of convert; default: reshard's own")
    parser.add_argument("--child", nargs="+", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        if len(options.child) == 2:
            child(options.child[0], options.child[1], options.tp, options.ep, options.workers, options.layout)
        else:
            child_check(options.child[0])
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        source = folder / "checkpoint"
        if options.kimi:
            make_kimi(source)
        else:
            make_deepseek(source, options.gigabytes, PUBLISHED if options.layout == "deepseek-mp" else HIDDEN)
        size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
        rounds = []
        for number in range(options.rounds):
            rounds.append(one_round(source, folder, options, number == options.rounds - 1))
            print(f"round {number}: {rounds[-1]}", file=sys.stderr)
        report(size, rounds, options)


if __name__ == "__main__":
    main()
