"""What an output is made of, and how the marker of an unfinished one says it."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from shard_plans.checkpoints.headers import brief, load_json
from shard_plans.documents.digests import DIGEST
from shard_plans.errors import CheckpointError, PlanError
from shard_plans.placement.experts import format_ids, parse_ids

MOST_PARTS = 100_000


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
        value: Any = load_json(raw.decode("ascii"), "the marker")
        ranks = value.get("ranks")
        only = None if ranks is None else parse_ids(str(ranks))
        plan, source, parts = value["plan"], value["source"], value.get("parts", 1)
        via = value.get("via")
    except (KeyError, TypeError, AttributeError, PlanError, CheckpointError) as error:
        raise ValueError(f"not a marker: {error}") from error
    for digest in (plan, source, *([] if via is None else [via])):
        if type(digest) is not str or not DIGEST.fullmatch(digest):
            raise ValueError(f"not a marker: {brief(digest)} is no digest")
    if type(parts) is not int or not 1 <= parts <= MOST_PARTS:
        raise ValueError(f"not a marker: {brief(parts)} parts")
    return Identity(plan, source, only, parts, via)
