"""A cluster of the user's own: cards, links and host memory in a YAML file (docs/cli.md)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from shard_plans.checkpoints.headers import brief
from shard_plans.documents.yaml_text import Lines, check_schema, load_yaml
from shard_plans.errors import ClusterError
from shard_plans.memory.card import RATES, Card, Link, known_cards, latency_of
from shard_plans.memory.cluster import LARGEST_MEMORY, Cluster, make_cluster, parse_card, parse_size

_COUNT: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": 65536}
_SPEED: dict[str, Any] = {"type": "number", "minimum": 0.001, "maximum": 1e9}
_LATENCY: dict[str, Any] = {"type": "number", "minimum": 0, "maximum": 1e9}
_LINK: dict[str, Any] = {
    "type": "object",
    "required": ["bandwidth"],
    "additionalProperties": False,
    "properties": {"name": {"type": "string"}, "bandwidth": _SPEED, "latency": _LATENCY},
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["reshard_cluster", "nodes", "cards", "card"],
    "additionalProperties": False,
    "properties": {
        "reshard_cluster": {"const": 1, "description": "1, the version that this reshard reads"},
        "nodes": _COUNT,
        "cards": _COUNT,
        "card": {"type": ["string", "integer"], "description": "a preset, or a name of your own with its memory"},
        "memory": {"type": "string", "description": "a size such as 80GB"},
        "bandwidth": _SPEED,
        "tflops": {
            "type": "object",
            "additionalProperties": False,
            "properties": {rate: _SPEED for rate in RATES},
        },
        "link": _LINK,
        "network": _LINK,
        "host_memory": {"type": "string", "description": "host memory of a node, such as 2TB"},
        "source": {"type": "string"},
    },
}


def read_cluster(path: Path) -> Cluster:
    """Nodes, cards a node, and a card: a preset whose figures the file may replace, or one of the user's own.

    Units: bandwidth GB/s (of memory; of links one card, one direction), latency microseconds, sizes with their unit.
    Raises ClusterError naming the key and the line.
    """
    what = f"cluster file {path.name}"
    data, lines = load_yaml(path, what, ClusterError)
    check_schema(data, SCHEMA, lines, what, ClusterError)
    card = _base(data, what, lines)
    source = str(data.get("source", what))
    changed: dict[str, Any] = {}
    if "memory" in data:
        changed["memory"], changed["source"] = _size(data, "memory", what, lines), source
    if "bandwidth" in data:
        changed["bandwidth"] = data["bandwidth"] * 1e9
    if "tflops" in data:
        changed["flops"] = {**card.flops, **{rate: value * 1e12 for rate, value in data["tflops"].items()}}
    for key in ("link", "network"):
        if key in data:
            changed[key] = _link(data[key], key)
    if "host_memory" in data:
        changed["host_memory"] = _size(data, "host_memory", what, lines) // data["cards"]
    told = [name for key in changed for name in (data["tflops"] if key == "flops" else (key,)) if key != "source"]
    card = replace(card, **changed, sources={**card.sources, **dict.fromkeys(told, source)})
    return make_cluster(data["nodes"], data["cards"], card, what)


def _base(data: dict[str, Any], what: str, lines: Lines) -> Card:
    """The preset that the file names, or an empty card of the user's own name."""
    name = str(data["card"])
    try:
        return parse_card(name)
    except ClusterError:
        if "memory" in data:
            return Card(name, 1)
    raise ClusterError(
        f"{what}, line {lines[('card',)]}: card {brief(name)} is unknown and the file gives no memory for it; "
        f"known: {', '.join(known_cards())}"
    )


def _size(data: dict[str, Any], key: str, what: str, lines: Lines) -> int:
    found = parse_size(data[key])
    if not found or found > LARGEST_MEMORY:
        raise ClusterError(f"{what}, line {lines[(key,)]}: {key} is {brief(data[key])}; give a size such as 80GB")
    return found


def _link(data: dict[str, Any], key: str) -> Link:
    name = data.get("name", key)
    latency = data["latency"] * 1e-6 if "latency" in data else latency_of("network" if key == "network" else name)
    return Link(name, data["bandwidth"] * 1e9, latency)
