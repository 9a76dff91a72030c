"""reshard itself: convert with the plan, then one process a rank under torchrun."""

from __future__ import annotations

from shard_plans.documents.plan import Plan
from shard_plans.launch.command import HEAD, NODE, Command, Launch, everywhere, node_shape

PORT = "29500"


def reshard_launch(plan: Plan, checkpoint: str, file: str | None = None) -> Launch:
    """Commands that write the shards and check them on the cards; the plan is expected in `file`, or plan.yaml."""
    nodes, ranks = node_shape(plan)
    several = ("--node-rank", NODE, "--master-addr", HEAD, "--master-port", PORT) if nodes > 1 else ("--standalone",)
    words = ("torchrun", "--nnodes", str(nodes), "--nproc-per-node", str(ranks), *several)
    return Launch(
        "reshard",
        (
            Command("one node", ("reshard", "convert", checkpoint, "shards", "--plan", file or "plan.yaml")),
            Command(
                everywhere(nodes), (*words, "-m", "reshard", "verify-and-run", "shards", "--reference", checkpoint)
            ),
        ),
        notes=() if file else ("-o plan.yaml writes the plan",),
    )
