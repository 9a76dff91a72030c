"""What a layout is: how the shards of a plan are named, fused and dealt to files, for one consumer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from shard_plans.documents.plan import NATIVE, Plan
from shard_plans.errors import PlanError
from shard_plans.families.binding import Binding
from shard_plans.families.vocabulary import COMPUTED
from shard_plans.placement.shards import Placement

__all__ = ["NATIVE", "Layout"]


class Layout(ABC):
    """The files that one consumer reads."""

    name: str
    """As in plans, with the consumer's release behind `@` where that matters."""
    engine: str
    """Whose loader reads it: reshard, vllm or deepseek."""
    loader: str
    """What loads it, in words."""

    computed: frozenset[str] = COMPUTED
    """Roles of buffers that are left out, because the consumer computes them."""

    @abstractmethod
    def adapt(self, binding: Binding, plan: Plan) -> Plan:
        """The plan as this layout carries it out: without what its consumer doesn't read."""

    @abstractmethod
    def refuse(self, binding: Binding, plan: Plan) -> None:
        """Raise PlanError where the layout can't express the plan or the model, with the reason and the way out."""

    @abstractmethod
    def place(self, binding: Binding, plan: Plan) -> Placement:
        """Every file, and which rank reads which. Raises what `refuse` raises, and GridError."""

    @abstractmethod
    def beside(self, carried: Sequence[str]) -> Sequence[str]:
        """Which of the files that are carried along the consumer wants beside the shards."""

    @abstractmethod
    def pads(self, name: str) -> bool:
        """Whether the shard tensor of that name may hold declared padding behind its rows: a vocabulary."""

    def chosen(self, binding: Binding, plan: Plan) -> Plan:
        """The plan with this layout."""
        return self.adapt(binding, replace(plan, layout=self.name))

    def cannot(self, what: str, way_out: str) -> PlanError:
        """The error for something that this layout can't express."""
        return PlanError(f"layout {self.name} can't hold {what}; {way_out}")
