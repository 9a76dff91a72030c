"""Which experts each (edp, ep) slot of a stage holds, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from shard_plans.errors import PlanError
from shard_plans.placement.grid import Grid

MAX_EXPERTS = 1 << 16
"""An id list longer than this is refused before it is expanded."""

Slots = tuple[tuple[int, ...], ...]
"""Expert ids in order, one tuple a slot."""


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """Expert ids of each slot: `ep` slots where all edp replicas hold the same, else `edp * ep` (edp slowest)."""

    default: Slots = ()
    """For every layer that `layers` doesn't name; empty for a model without experts."""
    layers: Mapping[int, Slots] = field(default_factory=dict)

    def slots(self, layer: int, grid: Grid) -> Slots:
        """Expert ids of all edp x ep slots of `layer`, indexed [edp * grid.ep + ep]."""
        slots = self.layers.get(layer, self.default)
        return slots if len(slots) == grid.edp * grid.ep else slots * grid.edp

    def held(self, layer: int, grid: Grid, edp: int, ep: int) -> tuple[int, ...]:
        """Expert ids that slot (edp, ep) holds in `layer`, in stacking order."""
        return self.slots(layer, grid)[edp * grid.ep + ep]

    def replicas_differ(self, grid: Grid) -> bool:
        """Whether some layer gives two edp replicas different experts (they can't share files then)."""
        return any(
            slots[edp * grid.ep : (edp + 1) * grid.ep] != slots[: grid.ep]
            for slots in (self.default, *self.layers.values())
            if len(slots) == grid.edp * grid.ep
            for edp in range(1, grid.edp)
        )

    def validate(self, experts: int, grid: Grid) -> None:
        """Raise PlanError unless every layer's slots fit the grid and every edp replica holds each expert."""
        for where, slots in (("by default", self.default), *((f"in layer {n}", s) for n, s in self.layers.items())):
            if len(slots) not in (grid.ep, grid.ep * grid.edp):
                apart = f" (all replicas alike) or {grid.ep * grid.edp}" if grid.edp > 1 else ""
                raise PlanError(
                    f"experts {where}: {len(slots)} lists for ep {grid.ep} and edp {grid.edp}; give {grid.ep}{apart}"
                )
            for number, ids in enumerate(slots):
                if not ids:
                    raise PlanError(f"experts {where}: slot {number} holds no expert; give every slot at least one")
                bad = next((i for i in ids if not 0 <= i < experts), None)
                if bad is not None:
                    raise PlanError(
                        f"experts {where}: slot {number} names expert {bad}, the model has 0 to {experts - 1}"
                    )
            for edp in range(len(slots) // grid.ep):
                replica = slots[edp * grid.ep : (edp + 1) * grid.ep]
                missing = set(range(experts)).difference(*replica)
                if missing:
                    raise PlanError(
                        f"experts {where}: expert {min(missing)} is on no ep slot"
                        + (f" of replica edp {edp}" if len(slots) > grid.ep else "")
                        + "; every expert must be held at least once"
                    )


def contiguous(experts: int, ep: int) -> Slots:
    """Experts dealt in order over `ep` slots; where they don't divide, the first slots hold one more."""
    base, more = divmod(experts, ep)
    starts = [slot * base + min(slot, more) for slot in range(ep + 1)]
    return tuple(tuple(range(start, stop)) for start, stop in pairwise(starts))


def parse_ids(text: str) -> tuple[int, ...]:
    """`0-3,7` -> (0, 1, 2, 3, 7); order and repeats are kept. Raises PlanError."""
    ids: list[int] = []
    for word in text.replace(" ", "").split(","):
        first, dash, last = word.partition("-")
        if not (first.isascii() and first.isdigit() and (not dash or (last.isascii() and last.isdigit()))):
            raise PlanError(f"expert ids {text!r}: {word!r} is neither a number nor a range such as 0-3")
        if max(len(first), len(last)) > 6:
            raise PlanError(f"expert ids {text!r}: {word!r} is too large")
        start, stop = int(first), int(last or first) + 1
        if stop <= start or len(ids) + stop - start > MAX_EXPERTS:
            raise PlanError(f"expert ids {text!r}: range {word!r} is empty or makes more than {MAX_EXPERTS} ids")
        ids.extend(range(start, stop))
    return tuple(ids)


def format_ids(ids: Sequence[int]) -> str:
    """(0, 1, 2, 3, 7) -> `0-3,7`; the inverse of parse_ids."""
    words: list[str] = []
    start = 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or ids[end] != ids[end - 1] + 1:
            first, last = ids[start], ids[end - 1]
            words.append(str(first) if first == last else f"{first}-{last}")
            start = end
    return ",".join(words)
