"""A sample of the mutation table (tests/mutations): each bug must be caught on the device too, and at its place."""

from __future__ import annotations

import random

from tests.gpu.part import Part, Setting
from tests.mutations.bugs import BUGS
from tests.mutations.models import PLANS, Outputs
from tests.mutations.run import try_bug


def run(setting: Setting) -> Part:
    """Bugs in a random order, each in a random family, as many as there is time for."""
    dice = random.Random(setting.seed)
    bugs, names = list(BUGS), list(PLANS)
    dice.shuffle(bugs)
    turns = range(len(names))  # every bug comes before one comes again
    every = [(bug, names[(place + turn) % len(names)]) for turn in turns for place, bug in enumerate(bugs)]
    part, outputs = Part("mutations", len(every)), Outputs(setting.checkpoints, setting.folder)
    caught = set[str]()
    for bug, family in part.within(setting.seconds, every):
        cell = try_bug(bug, family, setting.seed, outputs, setting.device)
        if cell is None:
            continue
        caught.add(bug.name)
        if not (cell.finding.caught and cell.finding.pinned):
            part.failures.append(f"{bug.name}, {family} {cell.place}: {', '.join(cell.finding.by) or 'not caught'}")
    part.figures["bugs"] = len(caught)
    return part
