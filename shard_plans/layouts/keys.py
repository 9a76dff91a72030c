"""Key maps: what an engine's release calls the parameters of each family, and which roles it lays in one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from shard_plans.documents.yaml_text import load_yaml
from shard_plans.errors import PlanError

FOLDER = Path(__file__).parent / "keys"


@dataclass(frozen=True, slots=True)
class KeyMap:
    """How one family's model class names things."""

    scales: str
    """The module of a layer that has the attention scales."""
    keys: Mapping[str, tuple[str, ...]]
    """Key -> roles laid one after the other, in the order in which they are tried."""
    weights: Mapping[str, str] = field(default_factory=dict)
    """Groups that the class holds in another precision than they are published in: as in `--weights`."""

    def assign(self, roles: Iterable[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
        """The keys that these roles fill. Raises PlanError for a role that none takes."""
        left = set(roles)
        for key, wanted in self.keys.items():
            if left.issuperset(wanted):
                left.difference_update(wanted)
                yield key, wanted
        if left:
            raise PlanError(f"no parameter of the engine holds {', '.join(sorted(left))}")


@cache
def _document(engine: str, release: str) -> dict[str, Any]:
    data, _ = load_yaml(FOLDER / f"{engine}-{release}.yaml", f"key map of {engine} {release}")
    return dict(data)


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
    entry = document[name]
    keys = {key: tuple(roles.split()) for key, roles in entry["keys"].items()}
    return KeyMap(entry["scales"], keys, entry.get("weights", {}))
