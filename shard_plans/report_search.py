"""What a search found, for people and for machines: speed, the next best plans, why others lost, what would fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from shard_plans.console import out, show_figures, size
from shard_plans.cost.prediction import Prediction
from shard_plans.documents.plan import NATIVE
from shard_plans.layouts.loaders import Loader
from shard_plans.placement.grid import Grid
from shard_plans.report import plan_json
from shard_plans.search.found import Found, Rejected


def found_json(found: Found) -> dict[str, Any]:
    """What `plan-memory --json` prints: the plan, and what the search knows of it."""
    cluster = found.plan.cluster
    return {
        **plan_json(found.plan),
        "goal": found.goal,
        "cluster": cluster
        and {"nodes": cluster.nodes, "cards": cluster.cards, "card": cluster.card.name, "memory": cluster.card.memory},
        "workload": asdict(found.plan.workload),
        "prediction": found.prediction and asdict(found.prediction),
        "grids": found.grids,
        "alternatives": [
            {
                "parallel": _sizes(other.candidate.grid),
                "stages": [list(stage) for stage in other.candidate.stages],
                "room": other.room,
                "prediction": other.candidate.prediction and asdict(other.candidate.prediction),
                "trades": other.trades,
            }
            for other in found.alternatives
        ],
        "rejected": [asdict(group) for group in found.rejected],
        "remedies": [asdict(remedy) for remedy in found.remedies],
        "experts": found.dealt and {"redundant": found.dealt.extra, "imbalance": found.dealt.imbalance},
        "loaders": [asdict(loader) for loader in found.loaders],
        "assumptions": list(found.assumptions),
    }


def show_found(found: Found, explain: bool = False) -> None:
    """Speed, alternatives, rejected groups, remedies and, where asked for, everything that is assumed."""
    console = out()
    if found.prediction is not None:
        _show_prediction(console, found.prediction, found.plan.grid)
    if found.dealt is not None:
        console.print(
            f"experts dealt by load: {found.dealt.extra} redundant in each layer, the busiest slot has "
            f"{found.dealt.imbalance:.2f} times the mean"
        )
    if found.alternatives:
        _show_alternatives(found)
    if found.rejected:
        _show_rejected(console, found.rejected, explain)
    if found.remedies:
        console.print("what would fit, or not:")
        for remedy in found.remedies:
            console.print(f"  {remedy.kind}: {remedy.text}", markup=False)
    if found.loaders:
        _show_loaders(console, found.loaders)
    if explain and found.assumptions:
        console.print("the prediction assumes:")
        for line in found.assumptions:
            console.print(f"  - {line}", markup=False)


def _show_prediction(console: Console, found: Prediction, grid: Grid) -> None:
    parts = [
        f"decode {_seconds(found.decode_step)} a step, {found.decode_tokens:,.0f} tokens/s",
        f"prefill {found.prefill_tokens:,.0f} tokens/s",
        f"first token of a whole context after {_seconds(found.first_token)}",
        f"communication {found.decode_links:.0%} of a step",
    ]
    if grid.pp > 1:
        parts.append(f"bubble {found.bubble:.0%}")
    console.print(f"predicted: {'; '.join(parts[:2])}")
    console.print(f"           {'; '.join(parts[2:])}")


def _show_alternatives(found: Found) -> None:
    table = Table(box=None, pad_edge=False, title="next best", title_justify="left", title_style="")
    for head in ("tp", "pp", "dp", "ep", "etp", "room", "tokens/s", "prefill/s", "first token", "comm."):
        table.add_column(head, justify="right", no_wrap=True)
    for other in found.alternatives:
        row = [*map(str, _sizes(other.candidate.grid).values()), size(other.room)]
        theirs, ours = other.candidate.prediction, found.prediction
        if theirs is not None and ours is not None:
            for name in ("decode_tokens", "prefill_tokens", "first_token"):
                row.append(f"{getattr(theirs, name) / getattr(ours, name) - 1:+.1%}")
            row.append(f"{theirs.decode_links:.0%}")
        table.add_row(*row)
    show_figures(table)


def _show_rejected(console: Console, groups: Sequence[Rejected], explain: bool) -> None:
    """One line a reason; every group where it is asked for."""
    words = {"memory": "need more memory", "speed": "are no better", "cut": "cut where nothing may be cut"}
    counts = {reason: sum(group.grids for group in groups if group.reason == reason) for reason in words}
    told = ", ".join(f"{count} {words[reason]}" for reason, count in counts.items() if count)
    console.print(f"rejected: {told}{'' if explain else ' (--explain says more)'}")
    if not explain:
        return
    table = Table(box=None, pad_edge=False)
    for head in ("tp", "pp", "plans", "reason"):
        table.add_column(head, justify="left" if head == "reason" else "right", overflow="fold")
    for group in groups:
        table.add_row(str(group.tp), str(group.pp or "any"), str(group.grids), group.detail)
    console.print(table)


def _show_loaders(console: Console, loaders: Sequence[Loader]) -> None:
    """What can load the shards, a line each."""
    console.print("shards of this plan can be loaded by:")
    for loader in loaders:
        how = "" if loader.layout == NATIVE else f" (convert --layout {loader.layout})"
        why = "yes" if loader.reason is None else f"no: {loader.reason}"
        console.print(f"  {loader.loader}{how}: {why}", markup=False, highlight=False)


def _sizes(grid: Grid) -> dict[str, int]:
    return {"tp": grid.tp, "pp": grid.pp, "dp": grid.dp, "ep": grid.ep, "etp": grid.etp}


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
