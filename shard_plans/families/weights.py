"""`--weights [GROUP=]FORMAT`: groups of parameters, and the formats that a plan can store them in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from shard_plans.checkpoints.headers import brief
from shard_plans.documents.yaml_text import load_yaml
from shard_plans.errors import PlanError

_FILE = Path(__file__).parent / "tables" / "_weights.yaml"
MATRICES = ("attention", "experts", "shared", "mlp")
"""Groups that a format without a group stands for; a plain one stands for OUTER too."""
OUTER = ("embeddings", "head")
SMALL = ("routers", "norms", "biases")
"""Groups that change only where they are named, and only to plain formats."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """One format of `--weights`."""

    name: str
    format: str | None
    """A storage format's name; None where values are plain."""
    block: tuple[int, int] | None
    """Rows and columns that share a scale; None: a whole row, or plain."""
    values: str
    """Type of the values, as safetensors names it."""
    scale: str | None


@cache
def _tables() -> tuple[dict[str, WeightFormat], dict[str, str]]:
    data, _ = load_yaml(_FILE, "weight formats")
    formats = {
        name: WeightFormat(
            name, entry.get("format"), tuple(entry["block"]) if isinstance(entry.get("block"), list) else None,
            entry["values"], entry.get("scale"),
        )
        for name, entry in data["formats"].items()
    }  # fmt: skip
    return formats, {word: group for group, words in data["groups"].items() for word in words}


def formats() -> Mapping[str, WeightFormat]:
    """Every format by its name."""
    return _tables()[0]


def group_of(role: str, quantised: bool) -> str | None:
    """The group of a role; None for what never changes. `quantised`: its row may be stored in a quantised format."""
    words = _tables()[1]
    if role.startswith("vision."):
        return None
    if role.endswith("bias"):
        return "biases"
    if role.rpartition(".")[2].endswith("norm"):
        return "norms"
    return words.get(role) or (words.get(role.partition(".")[0]) if quantised else None)


def parse_weights(given: Iterable[str]) -> dict[str, str]:
    """`fp8_block` or `experts=mxfp4_group`, several by commas -> group: format, in the groups' order.

    A format without a group stands for attention, experts, shared and mlp, a plain one for embeddings and head too;
    what is said of one group goes before it. Raises PlanError.
    """
    general: str | None = None
    named: dict[str, str] = {}
    for text in (word for item in given for word in item.split(",")):
        group, equals, name = text.strip().rpartition("=")
        if not equals and general is not None:
            said = f"--weights names {general or brief(general)} and {brief(name)} for all groups"
            raise PlanError(f"{said}; say which group each is for")
        if group in named:
            raise PlanError(f"--weights names {named[group]} and {brief(name)} for {group}; one of them must go")
        if equals:
            named[group] = name
        else:
            general = name
    found = dict.fromkeys((*MATRICES, *(OUTER if _plain(general) else ())), general)
    return check_weights({g: f for g, f in {**found, **named}.items() if f is not None})


def check_weights(weights: Mapping[str, str]) -> dict[str, str]:
    """The same in the groups' order, without groups that stay as stored. Raises PlanError for unknown words."""
    known = (*MATRICES, *OUTER, *SMALL)
    for group, name in weights.items():
        if group not in known:
            raise PlanError(f"weights: {brief(group)} is no group of parameters; groups: {', '.join(known)}")
        if name != STORED and name not in formats():
            raise PlanError(
                f"weights: {brief(name)} for {group} is no format; formats: {', '.join(formats())}, or {STORED}"
            )
        if group in SMALL and name != STORED and not _plain(name):
            plain = ", ".join(n for n in formats() if _plain(n))
            raise PlanError(f"weights: {group} can't be stored as {name}; formats for them: {plain}, or {STORED}")
    return {group: weights[group] for group in known if weights.get(group, STORED) != STORED}


STORED = "stored"
"""Stands for no change, where a group is to be left out of what is said of all."""


def _plain(name: str | None) -> bool:
    found = formats().get(name or "")
    return found is not None and found.format is None
