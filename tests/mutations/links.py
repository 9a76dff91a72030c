"""Bugs between ranks: of what they say to one another, of the plan that they go by, of layers that are left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from runtime import passes
from runtime import request as verb
from runtime.checking import edges
from runtime.comm.virtual_comm import VirtualComm
from runtime.hand_over import hand_over
from runtime.opened import Opened, open_output
from shard_plans.families.model import Layer
from shard_plans.placement.experts import ExpertPlacement
from tests.mutations.bug import STAGE, Bug, Site
from tests.mutations.code import replace_in_layer
from tests.mutations.lines import both, experts_here, split

Right = Callable[..., Tensor]


def own_part(right: Right, self: VirtualComm, x: Tensor, group: Sequence[int]) -> Tensor:
    """The last rank of the group isn't counted."""
    return right(self, torch.zeros_like(x) if self.rank == group[-1] else x, group)


def counted_twice(right: Right, self: VirtualComm, x: Tensor, group: Sequence[int]) -> Tensor:
    """The first rank of the group counts twice."""
    return right(self, 2 * x if self.rank == group[0] else x, group)


def other_order(right: Callable[..., list[Tensor]], self: VirtualComm, x: Any, group: Sequence[int]) -> list[Tensor]:
    """Parts come in the other order."""
    return list(reversed(right(self, x, group)))


def exchange(name: str, place: str, fits: Callable[[Site], bool], method: str, wrong: Any) -> Bug:
    """A collective of one layer that does something else."""
    return Bug(
        name, place, fits, lambda site: replace_in_layer(site.patch, site.layer.index, VirtualComm, method, wrong)
    )


def handed(change: Callable[[Tensor], Tensor]) -> Callable[[Site], None]:
    """What the layer's stage is handed is changed on the way."""

    def inject(site: Site) -> None:
        right = hand_over

        def wrong(ctx: Any, stages: Any, stage: int, x: Any, *rest: Any) -> Any:
            came = right(ctx, stages, stage, x, *rest)
            return came if came is None or stage + 1 != site.stage else change(came)

        for module in (passes, edges):
            site.patch.setattr(module, "hand_over", wrong)

    return inject


def believe(site: Site, change: Callable[[Opened], Opened]) -> None:
    """The ranks believe another plan or model than the files were made for."""
    site.patch.setattr(verb, "open_output", lambda out: change(open_output(out)))


def other_experts(site: Site) -> None:
    """The layer's experts lie one rank on."""

    def change(opened: Opened) -> Opened:
        plan = opened.plan
        slots = plan.experts.slots(site.layer.index, plan.grid)
        layers = {**plan.experts.layers, site.layer.index: (*slots[1:], slots[0])}
        return replace(opened, plan=replace(plan, experts=ExpertPlacement(plan.experts.default, layers)))

    believe(site, change)


def without_last(site: Site) -> None:
    """The model ends a layer early."""
    kept = tuple(layer for layer in site.model.layers if layer is not site.layer)
    believe(site, lambda opened: replace(opened, model=replace(opened.model, layers=kept)))


def left_out(site: Site) -> None:
    """The layer's stage passes the stream by it."""
    right = passes._layer

    def run(rank: Any, layer: Layer, start: Tensor, *rest: Any) -> Tensor:
        return start if layer.index == site.layer.index else right(rank, layer, start, *rest)

    site.patch.setattr(passes, "_layer", run)


def later_stage(site: Site) -> bool:
    """There is a stage before the layer's."""
    return site.stage > 0


LINKS = (
    exchange("a rank's part of the sum lost", "attn", split("tp"), "all_reduce", own_part),
    exchange("a rank's part of the sum twice", "attn", split("tp"), "all_reduce", counted_twice),
    exchange("tokens gathered in the other order", "ffn", both(experts_here, split("tp")), "all_gather", other_order),
    exchange("tokens of other ranks come back", "ffn", both(experts_here, split("ep")), "all_to_all", other_order),
    Bug("stream handed over one token off", STAGE, later_stage, handed(lambda x: x.roll(1, 0))),
    Bug("stream handed over in bf16", STAGE, later_stage, handed(lambda x: x.bfloat16().to(x.dtype))),
    Bug("stream of a stage not handed over", STAGE, later_stage, handed(torch.zeros_like)),
    Bug("experts one rank on", "ffn", both(experts_here, split("ep")), other_experts),
    Bug("layer left out", "attn", lambda site: True, left_out),
    Bug("last layer lost", "attn", lambda site: site.layer is site.model.forward_layers[-1], without_last),
)
