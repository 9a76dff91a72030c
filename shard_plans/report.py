"""Plans and inspections for people and for machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from shard_plans.console import out, show_figures, size
from shard_plans.documents.plan import Plan
from shard_plans.inspect import Inspection
from shard_plans.memory.amount import ENDS
from shard_plans.memory.ledger import LedgerRow
from shard_plans.report_precision import show_precision

PARTS = ("weights", "kv_cache", "activations", "communication", "runtime")
HEADS = ("ranks", "stage", "layers", "weights", "KV cache", "activ.", "comm.", "runtime", "total", "room")


def parallel(plan: Plan) -> dict[str, int]:
    """The parallel sizes with their world, as --json gives them."""
    grid = plan.grid
    return {"tp": grid.tp, "pp": grid.pp, "dp": grid.dp, "ep": grid.ep, "etp": grid.etp, "world": grid.world}


def plan_json(plan: Plan) -> dict[str, Any]:
    """What `plan-memory --json` prints."""
    rows = plan.ledger or ()
    return {
        "fits": plan.fits,
        "counted_at": plan.workload.assume,
        "parallel": parallel(plan),
        "stages": [list(stage) for stage in plan.stages],
        "ranks": [asdict(row) for row in rows],
        "weights": dict(plan.weights),
    }


def weights_line(weights: Mapping[str, str]) -> str:
    """Which groups of weights aren't stored as in the checkpoint."""
    return "weights " + ", ".join(f"{group}: {name}" for group, name in weights.items())


def load_line(plan: Plan) -> str:
    """What the plan is counted for."""
    load = plan.workload
    prefix = f", {load.prefix:,} of them shared" if load.prefix else ""
    where = f" on {plan.cluster.text}" if plan.cluster is not None else ""
    sequences = f"{load.concurrency:,} sequence{'s' * (load.concurrency > 1)}"
    return f"for {sequences} of {load.context:,} tokens{prefix}, KV cache {load.kv_dtype}, engine {load.engine}{where}"


def show_plan(plan: Plan) -> None:
    """The sizes, a line for each kind of rank, and the verdict."""
    console, sizes = out(), parallel(plan)
    named = "  ".join(f"{axis} {number}" for axis, number in sizes.items() if axis != "world")
    console.print(f"[bold]{plan.checkpoint.family}[/bold], {plan.checkpoint.tensors:,} tensors, ", end="")
    console.print(f"{size(plan.checkpoint.bytes)} -> {sizes['world']} rank{'s' * (sizes['world'] > 1)}: {named}")
    if plan.weights:
        console.print(weights_line(plan.weights))
    console.print(load_line(plan))
    idle = plan.grid.dp - plan.workload.concurrency
    if idle > 0:
        console.print(
            f"{idle:,} of {plan.grid.dp:,} replicas have no sequence: give --concurrency more, or fewer cards "
            f"(--goal fewest-cards)"
        )
    rows = plan.ledger or ()
    unit, scale = unit_of(max((row.total for row in rows), default=0))
    table = Table(box=None, pad_edge=False, title=f"{unit} a rank", title_justify="left", title_style="")
    for head in HEADS:
        table.add_column(head, justify="right", no_wrap=True)
    for first, last, row in alike(rows):
        start, stop = plan.stages[row.stage]
        numbers = [f"{getattr(row, part) / scale:.3g}" for part in (*PARTS, "total", "headroom")]
        table.add_row(
            span(first, last),
            str(row.stage),
            span(start, stop - 1),
            *numbers,
            style="" if row.headroom >= 0 else "red",
        )
    show_figures(table)
    if plan.fits is None:
        return
    worst = min(plan.ledger or (), key=lambda row: row.headroom)
    if plan.fits:
        console.print(
            f"[green]fits[/green]: the fullest rank ({worst.rank}) has {size(worst.headroom)} left, {counted(plan)}"
        )
    else:
        console.print(
            f"[red]does not fit[/red]: rank {worst.rank} needs {size(worst.total)}, it may take {size(worst.limit)} of "
            f"its card's {size(worst.capacity)}: {size(-worst.headroom)} too much, {counted(plan)}"
        )


def counted(plan: Plan) -> str:
    """Which end of what can't be computed the verdict took, and whether another would change it."""
    assume, rows = plan.workload.assume, plan.ledger or ()
    fits = {end: all(getattr(row, end) <= row.limit for row in rows) for end in ENDS}
    words = f"counted at the {assume} end of what can't be computed"
    others = [end for end in ENDS if fits[end] != fits[assume]]
    if not others:
        return words
    changed = "it fits" if fits[others[0]] else "it doesn't fit"
    return f"{words}; at the {' and the '.join(others)} end {changed}"


def unit_of(largest: int) -> tuple[str, float]:
    """The unit in which the largest number has one to three digits before the point."""
    return next(
        ((unit, scale) for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)) if largest >= scale), ("kB", 1e3)
    )


def span(first: int, last: int) -> str:
    """`3-7`, or `3` alone."""
    return f"{first}-{last}" if last > first else str(first)


def alike(rows: Sequence[LedgerRow]) -> list[tuple[int, int, LedgerRow]]:
    """Neighbouring ranks that need the same, as first rank, last rank and their row."""
    runs: list[tuple[int, int, LedgerRow]] = []
    for row in rows:
        if runs and _needs(runs[-1][2]) == _needs(row):
            runs[-1] = (runs[-1][0], row.rank, runs[-1][2])
        else:
            runs.append((row.rank, row.rank, row))
    return runs


def _needs(row: LedgerRow) -> tuple[int, ...]:
    return (row.stage, *(getattr(row, part) for part in PARTS), row.capacity, row.limit)


def show_inspection(found: Inspection) -> None:
    """What a checkpoint, config, plan or output is; of an output also what the node of each rank must copy."""
    console = out()
    facts = {"tensors": found.tensors, "parameters": found.parameters, "layers": found.layers, "experts": found.experts}
    words = [f"{value:,} {name}" for name, value in facts.items() if value]
    if found.bytes is not None:
        words.insert(1, size(found.bytes))
    told = f": {', '.join(words)}" if words else ""
    console.print(f"[bold]{found.kind}[/bold], family {found.family or 'unknown'}{told}")
    if found.parallel:
        console.print("  ".join(f"{axis} {number}" for axis, number in found.parallel.items()))
    if found.manifest is not None:
        steps = [f"output {origin.manifest} (plan {origin.plan})" for origin in found.via or ()]
        console.print(" -> ".join([f"checkpoint {found.source}", *steps, f"this output {found.manifest}"]))
    if found.weights:
        console.print(weights_line(found.weights))
    if found.groups:
        table = Table(box=None, pad_edge=False)
        for head in ("group", "tensors", "bytes", "stored as"):
            table.add_column(head, justify="left" if head in ("group", "stored as") else "right")
        for group in found.groups:
            table.add_row(group.name, f"{group.tensors:,}", size(group.bytes), ", ".join(group.dtypes))
        console.print(table)
    if found.ranks:
        table = Table(box=None, pad_edge=False)
        for head in ("rank", "stage", "bytes", "files to copy"):
            table.add_column(head, justify="left" if head == "files to copy" else "right", overflow="fold")
        for rank in found.ranks:
            table.add_row(str(rank.rank), str(rank.stage), size(rank.bytes), " ".join(rank.files))
        console.print(table)
    show_precision(found.converted or ())
