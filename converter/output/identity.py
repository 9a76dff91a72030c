"""What an output is made of, and how the marker of an unfinished one says it."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from shard_plans.errors import PlanError
from shard_plans.placement.experts import format_ids, parse_ids


@dataclass(frozen=True, slots=True)
class Identity:
    """What an output is made of."""

    plan: str
    """Digest of the plan."""
    source: str
    """Fingerprint of the checkpoint."""
    ranks: tuple[int, ...] | None = None
    """The ranks that it is made for, where not for all."""

    parts: int = 1
    """In how many parts it is made; of no matter when it is finished."""
    via: str | None = None
    """Digest of the manifest of the output whose shards it is made of; of no matter when it is finished."""

    @property
    def result(self) -> Identity:
        """What it is when it is finished."""
        return replace(self, parts=1, via=None)

    def __str__(self) -> str:
        via = "" if self.via is None else f", by the output {self.via}"
        parts = "" if self.parts == 1 else f" in {self.parts} parts"
        only = "" if self.ranks is None else f" for ranks {format_ids(self.ranks)}"
        return f"plan {self.plan} of checkpoint {self.source}{via}{only}{parts}"


def format_marker(identity: Identity) -> bytes:
    """The marker's bytes."""
    value: dict[str, str | int] = {"plan": identity.plan, "source": identity.source}
    if identity.parts > 1:
        value["parts"] = identity.parts
    if identity.via is not None:
        value["via"] = identity.via
    if identity.ranks is not None:
        value["ranks"] = format_ids(identity.ranks)
    return (json.dumps(value) + "\n").encode()


def parse_marker(raw: bytes) -> Identity:
    """The identity in a marker's bytes. Raises ValueError."""
    try:
        value = json.loads(raw)
        ranks = value.get("ranks")
        only = None if ranks is None else parse_ids(str(ranks))
        via = value.get("via")
        return Identity(
            str(value["plan"]),
            str(value["source"]),
            only,
            int(value.get("parts", 1)),
            None if via is None else str(via),
        )
    except (KeyError, TypeError, AttributeError, PlanError) as error:
        raise ValueError(f"not a marker: {error}") from error
