"""The commands plan-memory and inspect."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from shard_plans.console import emit, remark
from shard_plans.documents.plan import write_plan
from shard_plans.documents.plan_schema import KV_DTYPES
from shard_plans.options import Verb, family_option, json_option, sizes_options
from shard_plans.report import plan_json, show_inspection, show_plan
from shard_plans.verbs import inspect, plan_memory


@click.command("plan-memory", cls=Verb)
@click.argument("checkpoint", type=click.Path())
@click.option("--cluster", required=True, help="NODESxCARDS:CARD; CARD is a preset or a size (80GB, 80GiB).")
@sizes_options
@click.option("--context", default=8192, show_default=True, type=click.IntRange(1), help="Tokens of one sequence.")
@click.option("--concurrency", default=16, show_default=True, type=click.IntRange(1), help="Sequences at a time.")
@click.option(
    "--kv-dtype", default="bf16", show_default=True, type=click.Choice(list(KV_DTYPES)), help="KV cache type."
)
@family_option
@click.option("-o", "--output", type=click.Path(), help="Write the plan to this file.")
@json_option
def plan_memory_command(checkpoint: str, cluster: str, output: str | None, as_json: bool, **options: Any) -> None:
    """Choose what goes where on a cluster, and say whether it fits (exit 1: it doesn't)."""
    plan = plan_memory(checkpoint, cluster, **options)
    if output:
        write_plan(plan, Path(output))
    if as_json:
        emit(plan_json(plan))
    else:
        show_plan(plan)
    sys.exit(0 if plan.fits else 1)


@click.command("inspect", cls=Verb)
@click.argument("path", type=click.Path())
@family_option
@json_option
def inspect_command(path: str, family: str | None, as_json: bool) -> None:
    """Say what a checkpoint, config.json, plan or output is (exit 2: an architecture that no table describes)."""
    found = inspect(path, family)
    if as_json:
        emit(asdict(found))
    else:
        show_inspection(found)
    for note in found.notes:
        remark(f"reshard inspect: {note}")
    sys.exit(0 if found.family is not None else 2)
