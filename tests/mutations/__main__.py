"""The mutation table: `python -m tests.mutations [--seed S] [--families NAME ...] [--bugs WORD ...]`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from tests.mutations.bugs import BUGS
from tests.mutations.models import PLANS, Outputs
from tests.mutations.run import Cell, try_bug


def main() -> int:
    """Print a line for each bug and family; 0 where every bug is caught, at its place."""
    options = parser().parse_args()
    torch.set_num_threads(1)
    bugs = [bug for bug in BUGS if not options.bugs or any(word in bug.name for word in options.bugs)]
    with tempfile.TemporaryDirectory() as folder:
        outputs = Outputs(options.keep or Path(folder))
        missed = total = 0
        for bug in bugs:
            for family in options.families:
                cell = try_bug(bug, family, options.seed, outputs)
                if cell is not None:
                    total += 1
                    missed += not (cell.finding.caught and cell.finding.pinned)
                    print(words(cell), flush=True)
    print(f"{len(bugs)} bugs, {total} places, {missed} not caught where they are")
    return int(missed > 0)


def words(cell: Cell) -> str:
    """One line of the table."""
    found = cell.finding
    verdict = "MISSED" if not found.caught else "caught" if found.pinned else "ELSEWHERE"
    by = ", ".join(found.by)
    return f"{verdict:9} {cell.bug.name:34} {cell.family:17} {cell.place:40} {by}: {found.where[:150]}"


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    made.add_argument("--seed", type=int, default=0, help="chooses plans, layers, ranks and prompts")
    made.add_argument("--families", nargs="+", default=list(PLANS), choices=list(PLANS), metavar="NAME")
    made.add_argument("--bugs", nargs="+", default=[], metavar="WORD", help="only bugs whose name has one of these")
    made.add_argument("--keep", type=Path, help="a folder in which checkpoints and outputs are kept between runs")
    return made


if __name__ == "__main__":
    sys.exit(main())
