"""`python -m tests.gpu [--device cuda] [--seconds 420] [--json FILE]`: a table and a JSON object; 0 if all passed."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from runtime.comm import devices
from runtime.comm.devices import open_device
from tests.gpu import families, loading, mutations, processes, trained
from tests.gpu.part import Part, Setting
from tests.gpu.table import table

PARTS: dict[str, tuple[Callable[[Setting], Part], float]] = {
    "families": (families.run, 0.35), "mutations": (mutations.run, 0.3), "processes": (processes.run, 0.1),
    "trained": (trained.run, 0.15), "loading": (loading.run, 0.1),
}  # fmt: skip
"""Each part and its share of the time; the last one takes what it takes."""
CHECKPOINTS = Path(".pytest_cache/d/checkpoints")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts and print what they found."""
    options = parser().parse_args(arguments)
    torch.set_num_threads(1)  # tiny matrices
    device = open_device(options.device)
    parts = []
    options.checkpoints.mkdir(parents=True, exist_ok=True)
    for name in options.parts:
        run, share = PARTS[name]
        began = time.monotonic()
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            seconds = share * options.seconds
            setting = Setting(
                options.device, options.checkpoints.absolute(), Path(folder), seconds, options.seed, options.gigabytes
            )
            part = run(setting)
        part.seconds = round(time.monotonic() - began, 1)
        parts.append(part)
        print(f"{part.name}: {part.done} of {part.of}, {part.skipped or f'{len(part.failures)} failed'}, "
              f"{part.seconds} s", file=sys.stderr, flush=True)  # fmt: skip
    passed = all(part.passed for part in parts)
    found = {
        "passed": passed, "device": devices.describe(device), "torch": torch.__version__, "seed": options.seed,
        "parts": [part.as_dict() for part in parts],
    }  # fmt: skip
    print(table(found["device"], torch.__version__, parts))
    text = json.dumps(found, indent=1)
    if options.json is None:
        print(text)
    else:
        options.json.write_text(text + "\n")
    return 0 if passed else 1


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    made.add_argument("--device", default="cuda", help="as verify-and-run's; cpu shows that the script itself works")
    made.add_argument("--seconds", type=float, default=420.0, help="in which something new is begun")
    made.add_argument("--seed", type=int, default=0, help="chooses plans, bugs and places")
    made.add_argument("--gigabytes", type=float, default=2.0, help="size of the checkpoint that is loaded")
    made.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS), metavar="PART")
    made.add_argument("--checkpoints", type=Path, default=CHECKPOINTS, help="where made checkpoints are kept")
    made.add_argument("--folder", type=Path, help="where outputs are written; default: a temporary folder")
    made.add_argument("--json", type=Path, help="write the object there instead of printing it")
    return made


if __name__ == "__main__":
    sys.exit(main())
