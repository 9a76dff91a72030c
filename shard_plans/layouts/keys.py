"""Key maps: what an engine's release calls the parameters of each family, and which roles it lays in one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from shard_plans.documents.yaml_text import load_yaml
from shard_plans.errors import PlanError

FOLDER = Path(__file__).parent / "keys"
_ROLE = re.compile(r"(?:(\w+)\()?([\w.]+)\)?")


@dataclass(frozen=True, slots=True)
class Key:
    """A parameter of the engine."""

    name: str
    roles: tuple[str, ...]
    """Laid one after the other."""
    forms: tuple[str, ...]
    """How each is held (forms.py); empty: as stored."""
    beside: str
    """A role that must be in the layer too; empty: none."""


@dataclass(frozen=True, slots=True)
class KeyMap:
    """How one family's model class names things."""

    scales: str
    """The module of a layer that has the attention scales."""
    keys: tuple[Key, ...]
    """In the order in which they are tried."""
    reads: Mapping[str, str] = field(default_factory=dict)
    """Kind of layer -> how the class reads from config.json whether a layer is of it."""
    everywhere: tuple[str, ...] = ()
    """Roles outside the layers that every pipeline stage has."""
    text: str = ""
    """Where the text model lies in the class, with a dot behind; empty: it is the class."""

    def assign(self, roles: Iterable[str]) -> Iterator[Key]:
        """The keys that these roles fill. Raises PlanError for a role that none takes."""
        every = set(roles)
        left = set(every)
        for key in self.keys:
            if left.issuperset(key.roles) and (not key.beside or key.beside in every):
                left.difference_update(key.roles)
                yield key
        if left:
            raise PlanError(f"no parameter of the engine holds {', '.join(sorted(left))}")


@cache
def _document(engine: str, release: str) -> dict[str, Any]:
    data, _ = load_yaml(FOLDER / f"{engine}-{release}.yaml", f"key map of {engine} {release}")
    return dict(data)


@dataclass(frozen=True, slots=True)
class Release:
    """What one release of an engine can do."""

    stages: bool
    """Whether the files of pipeline stages have names of their own."""
    refines: bool
    """Whether it refines FP8 scales of experts that are cut inside a block."""
    routers: tuple[str, ...]
    """Families whose class quantises its router unless config.json lists its full name."""


def release_of(engine: str, release: str) -> Release:
    """What is known of a release."""
    document = _document(engine, release)
    return Release(bool(document["stages"]), bool(document["refines"]), tuple(document["routers"]))


def releases(engine: str) -> list[str]:
    """The releases of an engine that there are key maps for."""
    return sorted(path.stem.partition("-")[2] for path in FOLDER.glob(f"{engine}-*.yaml"))


def key_map(engine: str, release: str, family: str) -> KeyMap:
    """The key map of a family. Raises PlanError, with the reason where it is known, for a family without one."""
    document = _document(engine, release)
    name = document["families"].get(family)
    if name is None:
        known = ", ".join(document["families"])
        reason = document["refused"].get(family, f"there is no key map for it; known: {known}")
        raise PlanError(f"layout {engine}@{release} can't hold a {family} model: {reason}")
    scales, keys = _section(document, name)
    reads = document[name].get("reads", {})
    everywhere = tuple(document[name].get("everywhere", "").split())
    within = document[name].get("text", "")
    return KeyMap(scales, tuple(_key(key, text) for key, text in keys.items()), reads, everywhere, within)


def _section(document: Mapping[str, Any], name: str) -> tuple[str, dict[str, str]]:
    """A section's module with scales and its keys: its own, then those of the section that it is like."""
    entry = document[name]
    scales, others = _section(document, entry["like"]) if "like" in entry else ("", {})
    return entry.get("scales", scales), {**entry["keys"], **{k: v for k, v in others.items() if k not in entry["keys"]}}


def _key(name: str, text: str) -> Key:
    """`F32(moe.router)`, `attn.q attn.k attn.v`, `attn.o with gdn.norm`."""
    roles, _, beside = text.partition(" with ")
    found = [match.groups() for word in roles.split() if (match := _ROLE.fullmatch(word))]
    return Key(name, tuple(role for _, role in found), tuple(form or "" for form, _ in found), beside)
