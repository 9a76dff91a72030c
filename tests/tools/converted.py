"""Tiny checkpoints converted by plans made from sizes, for the tests of the converter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from converter.convert import ConvertResult, convert
from converter.options import WHOLE, ConvertOptions
from converter.output.parts import Part
from converter.streams.workers import Progress
from shard_plans.documents.plan import NATIVE, Plan
from shard_plans.errors import ReshardError
from shard_plans.families.binding import Binding
from shard_plans.layouts.registry import LAYOUTS, find_layout, lay_out_plan
from shard_plans.verbs import open_binding
from tests.tools.plans import make_plan


def bound(folder: Path) -> Binding:
    """The checkpoint in `folder`, or that of the output there, with its family."""
    return open_binding(folder)


def converted(
    folder: Path,
    out: Path,
    sizes: Mapping[str, int] | None = None,
    mtp: str = "keep",
    workers: int = 2,
    plan: Plan | None = None,
    progress: Progress | None = None,
    ranks: tuple[int, ...] | None = None,
    fresh: bool = False,
    part: Part = WHOLE,
    sha256: bool = False,
    weights: Mapping[str, str] | None = None,
    layout: str = NATIVE,
) -> ConvertResult:
    """Convert the checkpoint in `folder` into `out`, by a plan of these sizes or the plan given."""
    binding = bound(folder)
    plan = plan or make_plan(binding, sizes, mtp)
    plan = replace(plan, weights=weights) if weights else plan
    plan = find_layout(layout).chosen(binding, plan) if layout != NATIVE else plan
    options = ConvertOptions(ranks, fresh, part, sha256=sha256)
    return convert(binding.checkpoint, binding, plan, lay_out_plan(binding, plan), out, workers, progress, options)


def layouts_of(folder: Path, sizes: Mapping[str, int]) -> list[str]:
    """The layouts that can hold a plan of these sizes."""
    binding = bound(folder)
    found = [NATIVE]
    for name, layout in LAYOUTS.items():
        try:
            layout.place(binding, layout.chosen(binding, make_plan(binding, sizes)))
        except ReshardError:
            continue
        found += [name] if name != NATIVE else []
    return found


def small_chunks(patch: pytest.MonkeyPatch, size: int) -> None:
    """Let chunks be that small, so that tiny tensors have many."""
    modules = (
        "hashes", "streams.hashing", "forward.move", "forward.units", "forward.conversion", "sources.holdings",
        "sources.proof",
    )  # fmt: skip
    for module in (*(f"converter.{name}" for name in modules), "shard_plans.documents.shard_manifest"):
        patch.setattr(f"{module}.CHUNK", size)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file under `folder`, by its path there."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
