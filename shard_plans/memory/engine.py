"""The rules of serving engines as data: how each pads, copies, deals out and reserves, by version."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from shard_plans.documents.yaml_text import load_yaml
from shard_plans.errors import PlanError
from shard_plans.memory.amount import Amount

FOLDER = Path(__file__).parent / "engines"
GIB = 1 << 30
_VERSION = re.compile(r"[0-9]+(\.[0-9]+){0,3}")


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of an engine."""

    name: str
    value: Any
    source: str
    """Where it was read or seen."""


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine of one version."""

    name: str
    version: str
    rules: dict[str, Rule]

    def value(self, name: str, default: Any = None) -> Any:
        """The value of a rule; `default` where this engine has none."""
        return self.rules[name].value if name in self.rules else default

    def range(self, name: str) -> Amount:
        """A rule that is a range of GiB; nothing where the engine has none."""
        ends = self.value(name) or {"low": 0, "typical": 0, "high": 0}
        return Amount(*(round(ends[end] * GIB) for end in ("low", "typical", "high")))

    def source(self, name: str) -> str:
        """Where a rule was read or seen; empty where there is none."""
        return self.rules[name].source if name in self.rules else ""


@cache
def load_engine(text: str) -> Engine:
    """`vllm`, or `vllm@0.8.2` for the rules of that release. Raises PlanError where it can't be read or isn't known."""
    name, at, version = text.partition("@")
    path = FOLDER / f"{name}.yaml"
    if not re.fullmatch("[a-z]+", name) or not path.is_file():
        known = ", ".join(sorted(found.stem for found in FOLDER.glob("*.yaml")))
        raise PlanError(f"engine {text[:60]!r} is unknown; known: {known}, or NAME@VERSION")
    if at and not _VERSION.fullmatch(version):
        raise PlanError(f"engine {text[:60]!r}: {version[:30]!r} isn't a version such as 0.11 or 0.8.5")
    data, _ = load_yaml(path, f"rules of {name}")
    version = version or str(data["newest"])
    rules = {}
    for rule, cases in data["rules"].items():
        for case in cases:
            since, until = case.get("since"), case.get("until")
            if (since is None or _key(version) >= _key(str(since))) and (
                until is None or _key(version) < _key(str(until))
            ):
                rules[rule] = Rule(rule, case["value"], case["source"])
    return Engine(name, version, rules)


def _key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def engine_stages(engine: Engine, layers: int, stages: int) -> tuple[tuple[int, int], ...]:
    """Half-open layer ranges as an engine makes them by itself: layers // stages each, and what is left by its rule."""
    base, more = divmod(layers, stages)
    counts = [base] * stages
    rule = engine.value("stage_split", "first")
    if rule == "last_takes_rest":
        counts[-1] += more
    elif rule == "before_last_first":
        for stage in range(2, more + 2):
            counts[-stage] += 1
    else:
        counts = [base + (stage < more) for stage in range(stages)]
    edges = [0]
    for count in counts:
        edges.append(edges[-1] + count)
    return tuple(pairwise(edges))
