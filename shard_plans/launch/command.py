"""One command line for one or several nodes, and what an engine is started with."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shard_plans.documents.plan import Plan


class Shell(str):
    """A word that the shell is to fill in, and that isn't quoted."""

    __slots__ = ()


HEAD = Shell("$HEAD")
"""The address of node 0, set by the user."""
NODE = Shell("$NODE")
"""The number of the node on which a command is run, from 0."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command and where it is run."""

    where: str
    """`node 0`, `nodes 1-3`, `every node`, or `one node` for a command that is run once."""
    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """For a shell, one line; $HEAD and $NODE are left for it to fill in."""
        words = [f"{key}={value}" for key, value in self.environment.items()]
        return " ".join([*words, *(word if isinstance(word, Shell) else shlex.quote(word) for word in self.words)])


@dataclass(frozen=True, slots=True)
class Launch:
    """How one engine is started with a plan."""

    engine: str
    """reshard, vllm or sglang."""
    commands: tuple[Command, ...] = ()
    """None where the engine can't express the plan."""
    reasons: tuple[str, ...] = ()
    """Why it can't, as sentences."""
    notes: tuple[str, ...] = ()
    """What the engine does otherwise than the plan, or the user has to add."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files that the commands name: name -> text."""


def node_shape(plan: Plan) -> tuple[int, int]:
    """Nodes, and ranks on each: as few nodes as the cluster's cards allow, all with the same number of ranks."""
    world = plan.grid.world
    cards = plan.cluster.cards if plan.cluster is not None else world
    ranks = max(count for count in range(1, min(cards, world) + 1) if world % count == 0)
    return world // ranks, ranks


def one_replica(plan: Plan) -> Plan | None:
    """The plan of one replica where replicas share nothing, so that each can be a server by itself; None otherwise."""
    alone = plan.grid.one_replica(bool(plan.experts.default))
    if alone is None or plan.experts.replicas_differ(plan.grid):
        return None
    return replace(plan, grid=alone, workload=replace(plan.workload, concurrency=seats(plan)))


def each_replica(plan: Plan, commands: tuple[Command, ...]) -> tuple[Command, ...]:
    """The commands of one replica, for all of them."""
    where = f"once for each of {plan.grid.dp} replicas, on cards of its own"
    return tuple(
        replace(command, where=where if len(commands) == 1 else f"{where}: {command.where}") for command in commands
    )


def stored_otherwise(plan: Plan, engine: str) -> list[str]:
    """Why an engine that reads the checkpoint itself can't have the plan's precision."""
    if not plan.weights:
        return []
    told = ", ".join(f"{group} as {name}" for group, name in plan.weights.items())
    return [f"{engine} reads the checkpoint as it is stored; the plan stores {told}"]


def partition(plan: Plan, layers: int) -> str:
    """Layers that run of each stage, as engines take them: `16,15,15,15`. Multi-token prediction isn't counted."""
    return ",".join(str(min(stop, layers) - first) for first, stop in plan.stages)


def everywhere(nodes: int) -> str:
    """Where a command is run that is the same on all nodes."""
    return "every node" if nodes > 1 else "one node"


def seats(plan: Plan) -> int:
    """Sequences at a time on one data-parallel replica."""
    return math.ceil(plan.workload.concurrency / plan.grid.dp)
