"""The cluster that a plan is for: nodes, cards a node, and the memory of a card."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path

from shard_plans.checkpoints.headers import brief
from shard_plans.documents.yaml_text import load_yaml
from shard_plans.errors import ClusterError

LARGEST_WORLD = 65536
_FILE = Path(__file__).parent / "presets" / "cards.yaml"
_CLUSTER = re.compile(r"([0-9]{1,9})[xX]([0-9]{1,9}):(.+)")
_SIZE = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?) ?([KMGT]i?B)", re.IGNORECASE)
_UNITS = {"k": 1, "m": 2, "g": 3, "t": 4}


@dataclass(frozen=True, slots=True)
class Card:
    """One accelerator."""

    name: str
    """The preset's name, or the size as the user wrote it."""
    memory: int
    """Bytes."""
    bandwidth: int | None = None
    """Bytes a second of that memory; None where it isn't known."""
    source: str = "given as a size"
    """Where the figures are from, with the month."""


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
        """As parse_cluster reads it."""
        return f"{self.nodes}x{self.cards}:{self.card.name}"


@cache
def known_cards() -> dict[str, Card]:
    """The presets by name."""
    data, _ = load_yaml(_FILE, "card presets", ClusterError)
    return {
        name: Card(name, row["memory"] * 10**9, row["bandwidth"] * 10**9, f"{row['source']}, {row['date']}")
        for name, row in data.items()
    }


def parse_cluster(text: str) -> Cluster:
    """`4x8:s5000`, `2x2:80GB` (80e9 bytes a card) or `2x2:80GiB`.

    Raises ClusterError where it can't be read; an unknown card lists the known ones.
    """
    found = _CLUSTER.fullmatch(text.strip())
    if found is None:
        raise ClusterError(f"cluster {brief(text)} isn't NODESxCARDS:CARD, such as 4x8:s5000 or 2x2:80GB")
    nodes, cards = int(found[1]), int(found[2])
    if not nodes or not cards or nodes * cards > LARGEST_WORLD:
        raise ClusterError(f"cluster {brief(text)} has {nodes * cards} cards; 1 to {LARGEST_WORLD} can be planned for")
    return Cluster(nodes, cards, parse_card(found[3]))


def parse_card(text: str) -> Card:
    """A preset's name (case, spaces, `MTT` and `NVIDIA` don't matter) or a size such as 80GB, 80GiB, 79.5GiB."""
    word = text.strip()
    size = _SIZE.fullmatch(word)
    if size is not None:
        unit = size[2].lower()
        base = 1024 if "i" in unit else 1000
        memory = int(Fraction(size[1]) * base ** _UNITS[unit.rstrip("b").rstrip("i")])
        if memory < 1:
            raise ClusterError(f"card {brief(text)} has no memory; give a size above 0, such as 80GB")
        return Card(word.replace(" ", ""), memory)
    known = known_cards()
    plain = {_plain(name): name for name in known}
    name = plain.get(_plain(re.sub(r"(?i)\b(mtt|nvidia|amd|ascend|instinct|geforce)\b", "", word)))
    if name is None:
        raise ClusterError(
            f"card {brief(text)} is unknown; known: {', '.join(known)}; or give its memory, such as 80GB or 80GiB"
        )
    return known[name]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
