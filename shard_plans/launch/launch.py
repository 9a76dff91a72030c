"""How each engine is started with a plan: for people, and for --json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shard_plans.console import out
from shard_plans.documents.plan import Plan
from shard_plans.families.model import Model
from shard_plans.launch.command import Launch
from shard_plans.launch.sglang import sglang_launch
from shard_plans.launch.torchrun import reshard_launch
from shard_plans.launch.vllm import vllm_launch


def launches(plan: Plan, model: Model, checkpoint: str, file: str | None = None) -> tuple[Launch, ...]:
    """The commands of reshard, vLLM and SGLang for a plan of this model.

    `checkpoint` is the folder of the checkpoint, `file` the file of the plan (None: it was written to none).
    """
    layers = len(model.forward_layers)
    return (
        reshard_launch(plan, checkpoint, file),
        vllm_launch(plan, checkpoint, layers),
        sglang_launch(plan, checkpoint, layers),
    )


def launch_json(found: Sequence[Launch]) -> dict[str, Any]:
    """The key `launch` of --json."""
    return {
        "launch": [
            {
                "engine": each.engine,
                "commands": [
                    {"where": c.where, "environment": dict(c.environment), "words": list(c.words), "text": c.text}
                    for c in each.commands
                ],
                "reasons": list(each.reasons),
                "notes": list(each.notes),
                "files": dict(each.files),
            }
            for each in found
        ]
    }


def show_launch(found: Sequence[Launch]) -> None:
    """The commands as they can be pasted; $HEAD is the address of node 0, $NODE the number of the node."""
    console = out()
    for each in found:
        console.print(f"[bold]{each.engine}[/bold]")
        for reason in each.reasons:
            console.print(f"  can't express this plan: {reason}", highlight=False)
        for command in each.commands:
            console.print(f"  # {command.where}", highlight=False, markup=False)
            console.print(f"  {command.text}", soft_wrap=True, highlight=False, markup=False)
        for name in each.files:
            console.print(f"  # {name}: in the output of --json", highlight=False, markup=False)
        for note in each.notes:
            console.print(f"  # note: {note}", soft_wrap=True, highlight=False, markup=False)
