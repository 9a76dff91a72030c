"""One accelerator: its memory, how fast it reads, multiplies and talks; the presets, each figure with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from shard_plans.documents.yaml_text import load_yaml
from shard_plans.errors import ClusterError

_FILE = Path(__file__).parent / "presets" / "cards.yaml"
RATES = ("bf16", "fp8", "fp4")
"""Types of matrix products that a card may have a rate for."""


@dataclass(frozen=True, slots=True)
class Link:
    """What joins cards: inside a node, or between nodes."""

    name: str
    bandwidth: float
    """Bytes a second of one card in one direction."""
    latency: float
    """Seconds of one step of a collective."""


@dataclass(frozen=True, slots=True)
class Card:
    """One accelerator."""

    name: str
    """The preset's name, or the size as the user wrote it."""
    memory: int
    """Bytes."""
    bandwidth: float | None = None
    """Bytes a second of that memory; None where it isn't known."""
    source: str = "given as a size"
    """Where the memory's size is from, with the month."""
    flops: Mapping[str, float] = field(default_factory=dict)
    """Dense matrix products in FLOP a second, by type (RATES); empty where nothing is known."""
    link: Link | None = None
    """To the other cards of the node."""
    network: Link | None = None
    """To the cards of other nodes."""
    host_memory: int | None = None
    """Bytes of host memory for each card of a node."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where each figure is from, with the month."""


@cache
def known_cards() -> dict[str, Card]:
    """The presets by name."""
    return {name: _card(name, row) for name, row in _presets()["cards"].items()}


def named_card(name: str, memory: int, source: str) -> Card:
    """The preset of that name where its memory is the same, else a card of that memory alone."""
    known = known_cards().get(name)
    return known if known is not None and known.memory == memory else Card(name, memory, None, source)


@cache
def latency_of(name: str) -> float:
    """Seconds of one step over a link, by the first word of its name; `network` and `start` are words too."""
    found = _presets()["latencies"]
    return float(found.get(name.split()[0], found["other"])[0]) * 1e-6


def with_speeds(card: Card) -> Card:
    """The card with every speed filled in; what it lacks is assumed, and `sources` says so."""
    assumed = _card(card.name, _presets()["unnamed"])
    lacking = {name: getattr(assumed, name) for name in ("bandwidth", "link", "network") if getattr(card, name) is None}
    if "bf16" not in card.flops:
        lacking["flops"] = {**assumed.flops, **card.flops}
    keys = {"flops": "bf16"}
    told = {keys.get(name, name): assumed.sources[keys.get(name, name)] for name in lacking}
    return replace(card, **lacking, sources={**card.sources, **told})


@cache
def _presets() -> dict[str, Any]:
    data, _ = load_yaml(_FILE, "card presets", ClusterError)
    return dict(data)


def _card(name: str, row: Mapping[str, Any]) -> Card:
    """A card from its row; the last item of each figure names its source."""
    cited = {key: _presets()["sources"][value[-1]] for key, value in row.items() if key != "title"}
    told = {key: f"{entry['title']}, {entry['date']}" for key, entry in cited.items()}
    return Card(
        name, _scaled(row, "memory", 10**9) or 0, _scaled(row, "bandwidth", 10**9), told.get("memory", ""),
        {rate: row[rate][0] * 1e12 for rate in RATES if rate in row}, _link(row, "link"), _link(row, "network"),
        _scaled(row, "host", 10**9), told,
    )  # fmt: skip


def _scaled(row: Mapping[str, Any], key: str, unit: int) -> int | None:
    return round(row[key][0] * unit) if key in row else None


def _link(row: Mapping[str, Any], key: str) -> Link | None:
    if key not in row:
        return None
    name, gigabytes, _ = row[key]
    return Link(name, gigabytes * 1e9, latency_of("network" if key == "network" else name))
