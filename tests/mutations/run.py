"""One bug in one family: convert, spoil, verify."""

from __future__ import annotations

import random
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from runtime.opened import open_output
from tests.mutations.bug import Bug
from tests.mutations.judge import Finding, judge
from tests.mutations.models import EVERY, TOWERS, Outputs
from tests.mutations.pictures import pictures
from tests.mutations.site import choose

TOKENS, WORDS_BEHIND = 38, 240
"""Length of the prompts, so that windows at their end lie across two blocks of a cache; ids above are those of images
and ends in some models.
"""


@dataclass(frozen=True, slots=True)
class Cell:
    """One bug in one family."""

    bug: Bug
    family: str
    place: str
    """The plan, the layer and the rank."""
    finding: Finding


def prompt(dice: random.Random, tokens: int = TOKENS) -> str:
    """Random ids, as --input-ids takes them."""
    return ",".join(str(dice.randrange(3, WORDS_BEHIND)) for _ in range(tokens))


def try_bug(bug: Bug, family: str, seed: int, outputs: Outputs, device: str = "cpu") -> Cell | None:
    """The bug at a random place of the family's model, cut by a random plan; None where it can't be had at all."""
    dice = random.Random(f"{bug.name} {family} {seed}")
    if bug.images != (family in TOWERS):
        return None
    plans = list(EVERY[family])
    dice.shuffle(plans)
    for sizes in plans:
        whole = outputs.output(family, sizes)
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            out = Path(folder) / "out"
            shutil.copytree(whole, out)
            site = choose(bug, out, open_output(out), dice, patch)
            if site is None:
                continue
            ids = pictures(dice, site.model, Path(folder)) if bug.images else prompt(dice)
            bug.inject(site)
            finding = judge(bug, site, outputs.checkpoint(family), ids, device)
            words = " ".join(f"{axis} {size}" for axis, size in sizes.items())
            return Cell(bug, family, f"{words}: layer {site.layer.index}, rank {site.rank}", finding)
    return None
