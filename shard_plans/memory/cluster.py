"""The cluster that a plan is for: nodes, cards a node, and the card."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from shard_plans.checkpoints.headers import brief
from shard_plans.errors import ClusterError
from shard_plans.memory.card import Card, known_cards

LARGEST_WORLD = 65536
LARGEST_MEMORY = 1 << 60
"""Bytes of one card."""
_CLUSTER = re.compile(r"([0-9]{1,9})[xX]([0-9]{1,9}):(.+)")
_SIZE = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?) ?([KMGT]i?B)", re.IGNORECASE)
_UNITS = {"k": 1, "m": 2, "g": 3, "t": 4}


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal nodes of equal cards."""

    nodes: int
    cards: int
    """Cards in each node."""
    card: Card

    @property
    def world(self) -> int:
        """All cards."""
        return self.nodes * self.cards

    @property
    def text(self) -> str:
        """As parse_cluster reads it, where the card is a preset or a size."""
        return f"{self.nodes}x{self.cards}:{self.card.name}"


def parse_cluster(text: str) -> Cluster:
    """`4x8:s5000`, `2x2:80GB` (80e9 bytes a card), `2x2:80GiB`, or the path of a cluster file (`mine.yaml`).

    Raises ClusterError where it can't be read; an unknown card lists the known ones.
    """
    if text.strip().endswith((".yaml", ".yml")):
        from shard_plans.memory.cluster_file import read_cluster

        return read_cluster(Path(text.strip()))
    found = _CLUSTER.fullmatch(text.strip())
    if found is None:
        raise ClusterError(
            f"cluster {brief(text)} isn't NODESxCARDS:CARD, such as 4x8:s5000 or 2x2:80GB, nor a .yaml file"
        )
    return make_cluster(int(found[1]), int(found[2]), parse_card(found[3]), f"cluster {brief(text)}")


def make_cluster(nodes: int, cards: int, card: Card, what: str) -> Cluster:
    """A cluster of at least one card and at most LARGEST_WORLD; `what` names it in the ClusterError."""
    if not nodes or not cards or nodes * cards > LARGEST_WORLD:
        raise ClusterError(f"{what} has {nodes * cards} cards; 1 to {LARGEST_WORLD} can be planned for")
    return Cluster(nodes, cards, card)


def parse_card(text: str) -> Card:
    """A preset's name (case, spaces, `MTT`, `NVIDIA` and `RTX` don't matter) or a size such as 80GB, 80GiB, 79.5GiB."""
    word = text.strip()
    memory = parse_size(word)
    if memory is not None:
        if memory < 1:
            raise ClusterError(f"card {brief(text)} has no memory; give a size above 0, such as 80GB")
        if memory > LARGEST_MEMORY:
            raise ClusterError(f"card {brief(text)} has {memory} bytes; at most {LARGEST_MEMORY} can be planned for")
        return Card(word.replace(" ", ""), memory)
    known = known_cards()
    name = {_plain(name): name for name in known}.get(_plain(word))
    if name is None:
        raise ClusterError(
            f"card {brief(text)} is unknown; known: {', '.join(known)}; or give its memory, such as 80GB or 80GiB"
        )
    return known[name]


def parse_size(text: str) -> int | None:
    """Bytes of `80GB`, `80GiB`, `1.5 TB`; None where it isn't a size."""
    size = _SIZE.fullmatch(text)
    if size is None:
        return None
    unit = size[2].lower()
    base = 1024 if "i" in unit else 1000
    return int(Fraction(size[1]) * base ** _UNITS[unit.rstrip("b").rstrip("i")])


def _plain(name: str) -> str:
    """A card's name without its maker, line and punctuation."""
    return re.sub(r"\b(mtt|nvidia|amd|huawei|ascend|instinct|geforce|rtx)\b|[^a-z0-9]", "", name.lower())
