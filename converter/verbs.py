"""The verbs of this package as functions of paths: convert, check, adopt, restore."""

from __future__ import annotations

import os
from dataclasses import replace
from os import PathLike
from pathlib import Path

from converter.adopt import AdoptResult
from converter.adopt import adopt as adopt_folder
from converter.check import CheckResult
from converter.check import check as check_output
from converter.convert import ConvertResult
from converter.convert import convert as convert_placed
from converter.forward.selection import parse_ranks
from converter.options import ConvertOptions
from converter.output.parts import Part, parse_part, part_from_environment
from converter.restore import RestoreResult
from converter.restore import restore as restore_output
from converter.streams.workers import Progress
from shard_plans.console import remark
from shard_plans.documents.plan import Plan, read_plan
from shard_plans.documents.plan_check import check_plan
from shard_plans.errors import PlanError
from shard_plans.layouts.registry import find_layout, lay_out_plan
from shard_plans.memory.count import with_ledger
from shard_plans.placement.grid import make_grid
from shard_plans.search.search import make_plan
from shard_plans.verbs import Weights, as_weights, open_binding

AnyPath = str | PathLike[str]


def convert(
    checkpoint: AnyPath,
    out: AnyPath,
    plan: Plan | AnyPath | None = None,
    *,
    tp: int | None = None,
    pp: int | None = None,
    dp: int | None = None,
    ep: int | None = None,
    etp: int | None = None,
    mtp: str = "keep",
    strict_blocks: bool = False,
    weights: Weights = (),
    family: AnyPath | None = None,
    ranks: str | None = None,
    part: str | None = None,
    fresh: bool = False,
    sha256: bool = False,
    buffer: int = 16 << 20,
    layout: str | None = None,
    workers: int = 4,
    progress: Progress | None = None,
) -> ConvertResult:
    """Write the shard files of a plan, or of the sizes given, into the folder `out`.

    `layout`: for another loader than reshard's own (docs/engines.md); the plan's where it isn't given.
    """
    options = ConvertOptions(parse_ranks(ranks) if ranks is not None else None, fresh, _part(part), buffer, sha256)
    binding = open_binding(checkpoint, family)
    if plan is None:
        grid = make_grid(tp, pp, dp, ep, etp)
        plan = make_plan(binding, grid, mtp, strict_blocks, weights=as_weights(weights))
    else:
        given = {"tp": tp, "pp": pp, "dp": dp, "ep": ep, "etp": etp}
        clash = [*(name for name, size in given.items() if size is not None), *(["weights"] if weights else [])]
        if clash:
            raise PlanError(f"a plan and {', '.join(clash)} were both given; the plan says the sizes already")
        plan = plan if isinstance(plan, Plan) else read_plan(Path(plan))
    plan = check_plan(plan, binding)
    if layout is not None:
        plan = find_layout(layout).chosen(binding, plan)
    placement = lay_out_plan(binding, plan)
    plan = with_ledger(plan, binding)
    result = convert_placed(binding.checkpoint, binding, plan, placement, Path(out), workers, progress, options)
    return replace(result, fits=plan.fits)


def _part(text: str | None) -> Part:
    """The part asked for; unasked, the one that torchrun or srun started this process for."""
    if text is not None:
        return parse_part(text)
    found = part_from_environment(os.environ)
    if found is None:
        return Part()
    remark(f"this process makes part {found[0]}, because {found[1]} started it; --part 1/1 makes everything")
    return found[0]


def check(out: AnyPath, deep: AnyPath | None = None, progress: Progress | None = None) -> CheckResult:
    """Check the hashes of an output and, with `deep`, every byte of it against that checkpoint."""
    return check_output(Path(out), Path(deep) if deep is not None else None, progress=progress)


def adopt(
    folder: AnyPath,
    checkpoint: AnyPath | None = None,
    family: AnyPath | None = None,
    workers: int = 4,
    progress: Progress | None = None,
) -> AdoptResult:
    """Write hashed manifests into the folder that an engine's own tool wrote: then check, restore and convert read it.

    `checkpoint`: what it was made from, or its config.json; without it the folder's own config.json counts.
    """
    return adopt_folder(
        Path(folder),
        Path(checkpoint) if checkpoint is not None else None,
        Path(family) if family is not None else None,
        workers,
        progress,
    )


def restore(out: AnyPath, folder: AnyPath, progress: Progress | None = None, converted: bool = False) -> RestoreResult:
    """Write the checkpoint again that an output was made from, into a new or empty folder.

    `converted`: with the weights whose precision the plan changed as they are now.
    """
    return restore_output(Path(out), Path(folder), progress=progress, converted=converted)
