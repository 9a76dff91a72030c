"""reshard's own layout: files that replicas share, attention apart from experts; rows fused, experts stacked."""

from __future__ import annotations

from collections.abc import Sequence

from shard_plans.documents.plan import NATIVE, Plan
from shard_plans.families.binding import Binding
from shard_plans.layouts.layout import Layout
from shard_plans.placement.place import place
from shard_plans.placement.shards import Placement


class Native(Layout):
    """Expresses every plan; verify-and-run reads it."""

    name, engine, loader = NATIVE, "reshard", "reshard verify-and-run"
    computed = frozenset()  # restore puts every byte back

    def adapt(self, binding: Binding, plan: Plan) -> Plan:
        """Nothing is left out."""
        return plan

    def refuse(self, binding: Binding, plan: Plan) -> None:
        """Nothing is refused that the grid allows."""

    def place(self, binding: Binding, plan: Plan) -> Placement:
        """One file a (stage, tp), and one a (stage, ep, etp) for experts."""
        return place(binding, plan)

    def pads(self, name: str) -> bool:
        """Embedding and head, also those for multi-token prediction."""
        return name.rsplit(".", 1)[-1] in ("embed", "head")

    def beside(self, carried: Sequence[str]) -> Sequence[str]:
        """None: they lie under source/."""
        return ()
