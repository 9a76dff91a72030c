"""How often each expert of each layer was chosen: a file of counts, as JSON or CSV."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shard_plans.checkpoints.headers import brief
from shard_plans.checkpoints.regular import open_regular
from shard_plans.errors import PlanError
from shard_plans.families.binding import Binding

LARGEST_FILE = 64 << 20
"""Bytes of a load file; Kimi K3's 82,432 counts take 1 MB."""
LARGEST_COUNT = 2**62


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """Counts by layer; a layer that the file leaves out is taken to be even."""

    layers: Mapping[int, tuple[float, ...]]
    """Layer -> one count an expert, none negative, not all zero."""


def read_load(path: Path, binding: Binding) -> ExpertLoad:
    """Counts from a file, checked against the model.

    JSON: `{"LAYER": [count, ...], ...}` or a list of lists, one for each layer with experts, in order. CSV: the header
    `layer,expert,count`, then a line for each expert. Raises PlanError where the shape isn't the model's.
    """
    what = f"expert load {path.name}"
    moe = sorted({p.layer for p in binding.parameters if p.per_expert and p.layer is not None})
    if not moe:
        raise PlanError(f"{what}: this {binding.family.name} model has no experts")
    experts = binding.model.sizes["experts"]
    text = _text(path, what)
    found = _from_csv(text, what, experts) if path.suffix.lower() == ".csv" else _from_json(text, what, moe, binding)
    layers = {}
    for layer, counts in found.items():
        if layer not in moe:
            raise PlanError(f"{what}: layer {layer} has no experts; layers that have: {moe[0]} to {moe[-1]}")
        if len(counts) != experts:
            raise PlanError(f"{what}: layer {layer} has {len(counts)} counts, the model has {experts} experts")
        for expert, count in enumerate(counts):
            if not _countable(count):
                raise PlanError(f"{what}: layer {layer}, expert {expert}: {brief(count)} isn't a count of 0 or more")
        if not any(counts):
            raise PlanError(f"{what}: all counts of layer {layer} are 0; leave the layer out instead")
        layers[layer] = tuple(float(count) for count in counts)
    if not layers:
        raise PlanError(f"{what} holds no layer")
    return ExpertLoad(layers)


def _text(path: Path, what: str) -> str:
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            data = file.read(LARGEST_FILE + 1)
        if len(data) > LARGEST_FILE:
            raise PlanError(f"{what} has more than the {LARGEST_FILE} bytes that are read at most")
        return data.decode("utf-8")
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it isn't text"
        raise PlanError(f"{what} can't be read: {reason}") from error


def _from_json(text: str, what: str, moe: Sequence[int], binding: Binding) -> dict[int, Sequence[Any]]:
    try:
        data = json.loads(text, parse_constant=lambda word: word)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{what} isn't JSON: {brief(str(error))}") from error
    if isinstance(data, dict) and set(data) == {"layers"}:
        data = data["layers"]
    if isinstance(data, list):
        run = [layer for layer in moe if not binding.model.layers[layer].mtp]
        if len(data) not in (len(run), len(moe)):
            raise PlanError(f"{what} lists {len(data)} layers, the model has {len(run)} with experts")
        data = dict(zip(moe, data, strict=False))
    if not isinstance(data, dict):
        raise PlanError(f"{what} is neither an object of layers nor a list of them")
    found: dict[int, Sequence[Any]] = {}
    for key, counts in data.items():
        word = str(key)
        if not (word.isascii() and word.isdigit() and len(word) < 7):
            raise PlanError(f"{what}: {brief(word)} isn't a layer's number")
        if not isinstance(counts, list):
            raise PlanError(f"{what}: layer {word} holds {brief(counts)}, a list of counts is wanted")
        found[int(word)] = counts
    return found


def _from_csv(text: str, what: str, experts: int) -> dict[int, Sequence[Any]]:
    lines = csv.reader(text.splitlines())
    head = [word.strip() for word in next(lines, [])]
    if head != ["layer", "expert", "count"]:
        raise PlanError(f"{what} begins with {brief(','.join(head))}; the header layer,expert,count is wanted")
    found: dict[int, dict[int, float]] = {}
    for number, words in enumerate(lines, 2):
        if not words:
            continue
        try:
            layer, expert, count = int(words[0]), int(words[1]), float(words[2])
        except (ValueError, IndexError):
            raise PlanError(f"{what}, line {number}: {brief(','.join(words))} isn't layer,expert,count") from None
        if not 0 <= expert < experts:
            raise PlanError(f"{what}, line {number}: expert {expert}; the model has 0 to {experts - 1}")
        if expert in found.setdefault(layer, {}):
            raise PlanError(f"{what}, line {number}: expert {expert} of layer {layer} was counted before")
        found[layer][expert] = count
    return {layer: [counts[expert] for expert in sorted(counts)] for layer, counts in found.items()}


def _countable(count: Any) -> bool:
    return isinstance(count, (int, float)) and not isinstance(count, bool) and 0 <= count < LARGEST_COUNT
