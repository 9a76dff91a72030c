"""The commands plan-memory and inspect."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from shard_plans.apart import check_apart, output_of
from shard_plans.console import emit, remark
from shard_plans.documents.plan import write_plan
from shard_plans.launch.launch import launch_json, launches, show_launch
from shard_plans.layouts.loaders import refused_by
from shard_plans.memory.cluster import parse_cluster
from shard_plans.options import PATH, SIZES, Verb, contradictions, family_option, json_option, sizes_options
from shard_plans.report import show_inspection, show_plan
from shard_plans.report_bars import show_bars
from shard_plans.report_html.page import write_page
from shard_plans.report_lines import by_option, lines_json, show_lines
from shard_plans.report_search import found_json, show_found
from shard_plans.search.search import appraise
from shard_plans.search_options import SEARCH, report_options, search_options
from shard_plans.verbs import count_memory, find_plan, inspect, itemise, open_model
from shard_plans.workload_options import LOAD, workload_options


@click.command("plan-memory", cls=Verb)
@click.argument("checkpoint", type=PATH)
@click.option("--cluster", help="NODESxCARDS:CARD (a preset, or a size: 80GB, 80GiB), or a .yaml file.")
@click.option("--plan", type=PATH, help="Count the memory of this plan (edited by hand) instead of searching.")
@sizes_options
@search_options
@workload_options
@by_option
@report_options
@click.option("--launch", is_flag=True, help="Print the commands that start reshard, vLLM and SGLang with the plan.")
@family_option
@click.option("-o", "--output", type=PATH, help="Write the plan to this file.")
@json_option
@click.pass_context
def plan_memory_command(
    ctx: click.Context,
    /,
    checkpoint: str,
    cluster: str | None,
    plan: str | None,
    output: str | None,
    as_json: bool,
    by: str,
    explain: bool,
    html: str | None,
    launch: bool,
    **options: Any,
) -> None:
    """Choose what goes where on a cluster, and say whether it fits (exit 1: it doesn't)."""
    read = {"CHECKPOINT": checkpoint, "--cluster": cluster, "--family": options["family"],
            "--expert-load": options["expert_load"]}  # fmt: skip
    check_apart(
        {"-o": _path(output), "--html": _path(html)},
        {**{name: _path(given) for name, given in read.items()}, "--plan": output_of(_path(plan))},
    )
    if plan is not None:
        clash = contradictions(ctx, (*SIZES, *SEARCH, *LOAD))
        if clash:
            raise click.UsageError(f"--plan contradicts {', '.join(clash)}: the plan says it already")
        model = open_model(checkpoint, options["family"])
        found = appraise(model, count_memory(model, plan, cluster))
    elif cluster is None:
        raise click.UsageError("give --cluster NODESxCARDS:CARD to plan for, or --plan FILE to count its memory")
    else:
        parse_cluster(cluster)  # refused before headers are read
        model = open_model(checkpoint, options.pop("family"))
        found = find_plan(model, cluster, **options)
    for note in model.notes:
        remark(f"note: {note}")
    if plan is not None and not found.plan.fits:
        remark("note: without --plan, plan-memory searches, and says what would fit")
    if output:
        write_plan(found.plan, Path(output))
    if html:
        write_page(model, found, Path(html))
    lines = itemise(model, found.plan, by) if by != "rank" else ()
    where = "CHECKPOINT" if model.alone else checkpoint
    starts = launches(found.plan, model.model, where, plan or output) if launch else ()
    if as_json:
        emit({**found_json(found), **lines_json(by, lines), **(launch_json(starts) if launch else {})})
    else:
        show_plan(found.plan)
        show_bars(found.plan.ledger or ())
        show_lines(by, lines)
        show_found(found, explain)
        show_launch(starts)
    refusal = None if plan is not None or found.plan.weights else refused_by(options["engine"], found.loaders)
    if refusal is not None:
        remark(f"reshard plan-memory: {options['engine']} can't load this plan: {refusal}")
    sys.exit(0 if found.plan.fits and refusal is None else 1)


def _path(given: str | None) -> Path | None:
    return None if given is None else Path(given)


@click.command("inspect", cls=Verb)
@click.argument("path", type=PATH)
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
        remark(f"{'note' if found.family is not None else 'reshard inspect'}: {note}")
    sys.exit(0 if found.family is not None else 2)
