"""The longest sequence that a model is made for."""

from __future__ import annotations

from typing import Any

from shard_plans.errors import PlanError
from shard_plans.families.model import Model
from shard_plans.memory.workload import Workload


def longest_context(model: Model) -> int | None:
    """Tokens of config.json's max_position_embeddings; None where it doesn't say."""
    found = model.text.get("max_position_embeddings")
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else None


def make_workload(model: Model, **load: Any) -> Workload:
    """A workload of these fields for a model; a context that isn't given is 8192 or the model's longest.

    Raises PlanError where the context is longer than the model allows, or a field makes no sense.
    """
    longest = longest_context(model)
    if load.get("context") is None:
        load["context"] = min(Workload().context, longest or Workload().context)
    found = Workload(**load)
    if longest is not None and found.context > longest:
        raise PlanError(
            f"context {found.context} is longer than the {longest} tokens that this {model.family} model is made for "
            f"(max_position_embeddings in config.json)"
        )
    return found
