"""Families under plans: the device's logits against those that transformers computed on a CPU."""

from __future__ import annotations

import random
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from safetensors.torch import load_file, save_file

from runtime.request import RunOptions
from runtime.run import verify_and_run
from tests.checkpoints import cache
from tests.gpu.part import Part, Setting
from tests.mutations.models import make
from tests.tools.plans import plan_id
from tests.tools.sharded import convert_tiny, expected, failed, relative
from tests.whole.test_families import ARCHITECTURE_CELLS, CELLS, LIMIT
from tests.whole.test_images import NAMES

IDS, IMAGE = ("input_ids",), ("input_ids", "pixel_values", "image_grid_thw")


@dataclass(frozen=True, slots=True)
class Cell:
    """One family under one plan, with an image among its ids or without."""

    name: str
    plan: Mapping[str, int]
    image: bool

    def __str__(self) -> str:
        return f"{self.name} {plan_id(dict(self.plan))}" + (" with an image" if self.image else "")


def cells(seed: int) -> list[Cell]:
    """All of them in a random order in which every family comes before one comes again."""
    dice, kinds = random.Random(seed), dict[tuple[str, bool], list[Cell]]()
    pairs = [*CELLS, *((str(cell.values[0]), cell.values[1]) for cell in ARCHITECTURE_CELLS)]
    for name, plan in pairs:
        for image in (False, True) if name in NAMES else (False,):
            kinds.setdefault((name, image), []).append(Cell(name, plan, image))  # type: ignore[arg-type]
    queues = list(kinds.values())
    for queue in queues:
        dice.shuffle(queue)
    dice.shuffle(queues)
    return [cell for turn in zip_longest(*queues) for cell in turn if cell is not None]


def compare(cell: Cell, source: Path, folder: Path, device: str) -> tuple[float, float, set[str]]:
    """The relative errors of the logits (with transformers') and of the hidden states, and the checks that failed."""
    reference, ids, logits = expected(source), folder / "ids.safetensors", folder / "logits.safetensors"
    convert_tiny(source, folder / "out", cell.plan)
    prefix, names = ("vision.", IMAGE) if cell.image else ("", IDS)
    save_file({name.removeprefix("image_"): reference[prefix + name] for name in names}, ids)
    found = verify_and_run(RunOptions(folder / "out", source, device=device, input_ids=str(ids), logits_out=logits))
    worst = [check.worst for check in found.checks if check.name == "hidden"]
    error = relative(load_file(logits)["logits"], reference[f"{prefix}logits"][0])
    return error, worst[0] if worst and worst[0] is not None else float("inf"), failed(found)


def run(setting: Setting) -> Part:
    """As many cells as there is time for: every check of verify-and-run, and logits within 1e-5 of transformers'."""
    every = cells(setting.seed)
    part, seen = Part("families", len(every)), set[str]()
    for cell in part.within(setting.seconds, every):

        def write(folder: Path, name: str = cell.name) -> None:
            make(name, folder)

        folder = setting.folder / "family"
        folder.mkdir()
        error, hidden, wrong = compare(cell, cache.made(setting.checkpoints, cell.name, write), folder, setting.device)
        shutil.rmtree(folder)
        part.worst("logits", error)
        part.worst("hidden", hidden)
        if wrong or not error < LIMIT:
            part.failures.append(f"{cell}: logits {error:.2e}; failed: {', '.join(sorted(wrong)) or 'no check'}")
        seen.add(cell.name)
    part.figures["families"] = len(seen)
    return part
