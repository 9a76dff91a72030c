"""Seconds of collectives over the links of a cluster. Pure functions of bytes, groups and links.

Latencies are those of a tree, bandwidths those of a ring or of direct sends, as collective libraries choose by size
(the shape of the model is that of NCCL's src/graph/tuning.cc). Groups over several nodes work in two levels.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from shard_plans.memory.card import Link


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks of one collective and the nodes they lie on."""

    ranks: int
    nodes: int = 1

    @property
    def local(self) -> int:
        """Ranks on the fullest node."""
        return ceil(self.ranks / self.nodes)


def group(count: int, stride: int, cards: int) -> Group:
    """`count` ranks, `stride` apart, on nodes of `cards` ranks each: the most nodes that such a group may touch."""
    span = count * stride
    nodes = ceil(span / cards)
    if span % cards and cards % span:
        nodes += 1  # groups don't end where nodes do: some lie across a border
    return Group(count, max(1, min(nodes, count)))


@dataclass(frozen=True, slots=True)
class Network:
    """The links of a cluster as the collectives see them."""

    inside: Link
    between: Link
    start: float
    """Seconds that any collective takes before it moves anything."""
    efficiency: float = 1.0
    """Part of the links' bandwidth that is reached."""

    def all_reduce(self, size: float, among: Group) -> float:
        """Every rank has `size` bytes and ends with their sum."""
        return self.start + 2 * self._sweep(size, among) if among.ranks > 1 else 0.0

    def all_gather(self, size: float, among: Group) -> float:
        """Every rank ends with all `size` bytes, of which it had its part; a reduce-scatter takes the same."""
        return self.start + self._sweep(size, among) if among.ranks > 1 else 0.0

    def send(self, size: float, between_nodes: bool) -> float:
        """One rank hands `size` bytes to another."""
        link = self.between if between_nodes else self.inside
        return self.start + link.latency + size / (link.bandwidth * self.efficiency)

    def dispatch(self, tokens: float, row: float, topk: int, among: Group) -> float:
        """Every rank sends each of its `tokens` (`row` bytes) to the ranks that hold one of its `topk` experts.

        Hierarchical: a row goes once to each node that wants it, and there to each rank that wants it. Experts are
        chosen evenly. Combining the results costs the same.
        """
        if among.ranks == 1:
            return 0.0
        nodes, local = among.nodes, among.local
        wanted_nodes = _distinct(nodes, topk)
        wanted_ranks = _distinct(among.ranks, topk)
        far = tokens * row * wanted_nodes * (nodes - 1) / nodes
        near = tokens * row * wanted_ranks * (local - 1) / local
        latency = _steps(local) * self.inside.latency + _steps(nodes) * self.between.latency
        moved = near / self.inside.bandwidth + far / self.between.bandwidth
        return self.start + latency + moved / self.efficiency

    def _sweep(self, size: float, among: Group) -> float:
        """Half an all-reduce: inside each node, and between nodes each local rank with its part."""
        local, nodes = among.local, among.nodes
        inside = _steps(local) * self.inside.latency
        inside += (local - 1) / local * size / (self.inside.bandwidth * self.efficiency)
        between = _steps(nodes) * self.between.latency
        between += (nodes - 1) / nodes * (size / local) / (self.between.bandwidth * self.efficiency)
        return inside + between


def _steps(ranks: int) -> int:
    return ceil(log2(ranks)) if ranks > 1 else 0


def _distinct(places: int, draws: int) -> float:
    """Expected number of different places among `draws` even draws."""
    return places * (1 - (1 - 1 / places) ** draws)
