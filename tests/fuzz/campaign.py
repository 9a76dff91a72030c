"""Runs cases by the thousand in processes of their own: `python -m tests.fuzz.campaign [CASES] [--seed N]`."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path

from shard_plans.errors import ReshardError
from shard_plans.families import family
from tests.fuzz import documents, laws, outputs
from tests.fuzz.documents import Target
from tests.fuzz.guard import Guard

TARGETS: dict[str, tuple[type[Target], int]] = {
    "headers": (documents.Headers, 250), "indexes": (documents.Indexes, 100), "configs": (documents.Configs, 150),
    "plans": (documents.Plans, 160), "families": (documents.Families, 80), "words": (documents.Words, 100),
    "roots": (outputs.Roots, 70), "shard manifests": (outputs.ShardManifests, 70),
    "unfinished": (outputs.Unfinished, 20),
}  # fmt: skip
"""Each with its share of a thousand cases."""
READABLE = (sys.prefix, sys.base_prefix, str(Path(__file__).parents[2]), "/proc", "/sys", "/usr")
"""Where the program itself, and its libraries, read."""


@dataclass
class Tally:
    """What became of the cases of one target."""

    cases: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """By the kind of error."""
    valid: int = 0
    faults: list[str] = field(default_factory=list)


def run_target(name: str, cases: range, seed: str, report: Path) -> None:
    """Run these cases of a target, in this process, and write what became of them into `report`."""
    kind = TARGETS[name][0]
    setattr(os, "fsync", lambda handle: None)  # noqa: B010 (no power is lost here, and a busy disk takes its time)
    family.known_families = cache(family.known_families)  # they are the same for every case
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        target = kind(Path(folder))
        guard = Guard(Path(folder), READABLE)
        warm_up(target, guard)
        refused: Counter[str] = Counter()
        valid, faults, started = 0, [], time.monotonic()
        for number in cases:
            dice = random.Random(f"{seed}/{name}/{number}")
            try:
                case = target.mutate(dice)
                with guard.case():
                    target.run(case, dice)
                valid += 1
            except ReshardError as error:
                refused[type(error).__name__] += 1
                try:
                    laws.sentence(error)
                except AssertionError as fault:
                    faults.append(f"case {seed}/{name}/{number} {fault}")
            except BaseException as error:
                last = "".join(traceback.format_exception(error)[-4:])[-1500:]
                faults.append(f"case {seed}/{name}/{number}: {type(error).__name__}: {str(error)[:500]}\n{last}")
                print(faults[-1], file=sys.stderr)
            if number % 50 == 0:
                _write(report, number + 1 - cases.start, refused, valid, faults)
        _write(report, len(cases), refused, valid, faults)
        print(f"{name}: {len(cases)} cases in {time.monotonic() - started:.0f} s", file=sys.stderr)


def warm_up(target: Target, guard: Guard) -> None:
    """Read some cases whose outcome isn't counted, so that modules and caches aren't counted as the others'."""
    for number in range(20):
        dice = random.Random(f"warm/{number}")
        with suppress(Exception), guard.case():
            target.run(target.mutate(dice), dice)


def _write(report: Path, done: int, refused: Counter[str], valid: int, faults: list[str]) -> None:
    report.with_suffix(".new").write_text(json.dumps([done, dict(refused), valid, faults]))
    os.replace(report.with_suffix(".new"), report)


def campaign(cases: int, seed: str = "0", processes: int = 2, only: tuple[str, ...] = ()) -> dict[str, Tally]:
    """Run that many cases over all targets by their shares, or of some targets alone."""
    chosen = only or tuple(TARGETS)
    whole = sum(TARGETS[name][1] for name in chosen)
    counts = {name: max(1, cases * TARGETS[name][1] // whole) for name in chosen}
    left = [(name, part) for name in chosen for part in _parts(counts[name], processes)]
    tallies = {name: Tally() for name in chosen}
    running: dict[int, tuple[str, range, Path]] = {}
    with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
        while left or running:
            while left and len(running) < processes:
                name, part = left.pop(0)
                report = Path(folder) / f"{len(left)}.json"
                running[_start(name, part, seed, report)] = name, part, report
            child, status = os.wait()
            if child not in running:
                continue
            name, part, report = running.pop(child)
            done, refused, valid, faults = json.loads(report.read_text()) if report.exists() else (0, {}, 0, [])
            tally = tallies[name]
            tally.cases += done
            tally.refused.update(refused)
            tally.valid += valid
            tally.faults += faults
            if status or done != len(part):
                tally.faults.append(f"{name}: the process of cases {part} ended with status {status} after {done}")
    return tallies


def _parts(count: int, processes: int) -> list[range]:
    edges = [count * number // processes for number in range(processes + 1)]
    return [range(a, b) for a, b in pairwise(edges) if a < b]


def _start(name: str, part: range, seed: str, report: Path) -> int:
    child = os.fork()
    if not child:
        code = 1
        try:
            run_target(name, part, seed, report)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def main() -> None:
    """Run, print what became of the cases, and end with 1 where there was a fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="?", type=int, default=100_000)
    parser.add_argument("--seed", default=os.environ.get("RESHARD_FUZZ_SEED", "0"))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", action="append", default=[], choices=list(TARGETS))
    parser.add_argument("--case", help="one case again, by its name, with its fault raised")
    given = parser.parse_args()
    if given.case:
        again(given.case)
        return
    started = time.monotonic()
    found = campaign(given.cases, given.seed, given.processes, tuple(given.only))
    for name, tally in found.items():
        kinds = ", ".join(f"{kind} {count}" for kind, count in tally.refused.most_common())
        print(f"{name}: {tally.cases} cases, {tally.valid} valid, refused: {kinds}; {len(tally.faults)} faults")
    for tally in found.values():
        for fault in tally.faults:
            print("\n" + fault)
    total = sum(tally.cases for tally in found.values())
    print(f"\n{total} cases in {time.monotonic() - started:.0f} s")
    sys.exit(any(tally.faults for tally in found.values()))


def again(case: str) -> None:
    """Run one case without limits: SEED/TARGET/NUMBER, as a fault names it."""
    seed, name, number = case.split("/")
    faulthandler.enable()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        target = TARGETS[name][0](Path(folder))
        dice = random.Random(f"{seed}/{name}/{number}")
        made = target.mutate(dice)
        print(ascii(made)[:4000])
        target.run(made, dice)
        print("is valid")


if __name__ == "__main__":
    main()
