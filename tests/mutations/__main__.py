"""The mutation table: `python -m tests.mutations [--seeds S ...] [--families NAME ...] [--bugs WORD ...]`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from tests.mutations.bugs import BUGS
from tests.mutations.models import EVERY, Outputs
from tests.mutations.report import line, markdown
from tests.mutations.run import Cell, try_bug


def main() -> int:
    """Print a line for each bug, family and seed, and a table; 0 where every bug is caught, at its place."""
    options = parser().parse_args()
    torch.set_num_threads(1)
    bugs = [bug for bug in BUGS if not options.bugs or any(word in bug.name for word in options.bugs)]
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory() as folder:
        outputs = Outputs(options.keep or Path(folder) / "checkpoints", Path(folder))
        for bug in bugs:
            for family in options.families:
                for seed in options.seeds:
                    cell = try_bug(bug, family, seed, outputs)
                    if cell is not None:
                        cells.append(cell)
                        print(line(cell), flush=True)
    missed = sum(not (cell.finding.caught and cell.finding.pinned) for cell in cells)
    print(f"\n{markdown(cells)}\n\n{len(bugs)} bugs, {len(cells)} places, {missed} not caught where they are")
    return int(missed > 0)


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    made.add_argument("--seeds", type=int, nargs="+", default=[0], help="each chooses plans, layers, ranks and prompts")
    made.add_argument("--families", nargs="+", default=list(EVERY), choices=list(EVERY), metavar="NAME")
    made.add_argument("--bugs", nargs="+", default=[], metavar="WORD", help="only bugs whose name has one of these")
    made.add_argument("--keep", type=Path, help="a folder in which checkpoints are kept between runs")
    return made


if __name__ == "__main__":
    sys.exit(main())
