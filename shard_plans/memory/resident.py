"""What an engine makes of the weights that a rank reads: rows of padding, copies, tables; what it leaves out.

Every case is a rule in shard_plans/memory/engines, applied by the shapes and words of the family's table.
"""

from __future__ import annotations

from collections import Counter
from copy import copy
from dataclasses import dataclass, replace

from shard_plans.documents.plan import Plan
from shard_plans.families.dims import Share
from shard_plans.families.model import Layer
from shard_plans.memory.amount import exactly
from shard_plans.memory.caches import size
from shard_plans.memory.engine import load_engine
from shard_plans.memory.needs import Item
from shard_plans.memory.payload import Payload
from shard_plans.memory.rotary import rotary_tables
from shard_plans.placement.experts import ExpertPlacement, contiguous
from shard_plans.placement.grid import Coordinate, Grid

BF16 = 2


@dataclass(frozen=True, slots=True)
class Extras:
    """Bytes that an engine holds beside what a rank reads, on the first rank of each kind."""

    layers: tuple[int, ...]
    """Of every layer."""
    first: int
    last: int
    """What the first and the last stage hold beside their layers."""
    everywhere: int
    """What every stage holds."""


class Resident:
    """The difference between a rank's resident weights and what it reads, under one plan's engine."""

    def __init__(self, payload: Payload, plan: Plan) -> None:
        """The engine is the workload's."""
        self.payload, self.plan = payload, plan
        self.engine = load_engine(plan.workload.engine)
        self.model = payload.binding.model
        self.formats = {
            (p.layer, p.role): p.format
            for p in payload.binding.parameters
            if p.format is not None and p.layer is not None
        }
        self.biased = {p.role for p in payload.binding.parameters if p.role.endswith(".bias")}
        self._known: dict[tuple[int, int, int, int, int], tuple[Item, ...]] = {}

    def extra(self, at: Coordinate) -> int:
        """Bytes that `at` holds beside what it reads; below zero where the engine leaves layers out."""
        return sum(item.amount.typical for item in self.items(at))

    def items(self, at: Coordinate) -> tuple[Item, ...]:
        """The same, one by one."""
        if len(self.engine.rules) == 0 or not self._has_rules():
            return ()
        grid = self.plan.grid
        key = (at.stage, at.tp, at.edp if self.plan.experts.replicas_differ(grid) else 0, at.ep, at.etp)
        if key not in self._known:
            found = [*self._left_out(at), *self._vocabulary(at), *self._tables()]
            for index in range(*self.plan.stages[at.stage]):
                layer = self.model.layers[index]
                if not (layer.mtp and self.engine.value("mtp") == "drop"):
                    found += [*self._latent_copies(layer, at), *self._padded_experts(layer, at)]
                    found += self._shared_experts(layer, at)
            self._known[key] = tuple(item for item in found if item.amount.typical)
        return self._known[key]

    def extras(self, grid: Grid) -> Extras:
        """What the engine adds to each layer and to the ends under another grid, experts dealt in order."""
        model, experts = self.model, self.model.sizes.get("experts", 0)
        other = copy(self)
        other._known = {}
        other.plan = replace(
            self.plan, grid=replace(grid, pp=1), stages=((0, len(model.layers)),), mtp="drop",
            experts=ExpertPlacement(contiguous(experts, grid.ep)) if experts else ExpertPlacement(),
        )  # fmt: skip
        layers, words = [0] * len(model.layers), Counter[str]()
        for item in other.items(other.plan.grid.coordinate(0)):
            if item.layer is None:
                words[item.operator] += item.amount.typical
            else:
                layers[item.layer] += item.amount.typical
        ends = 1 if model.tied else 2
        each = words["vocabulary padding"] // ends
        return Extras(tuple(layers), each, each if ends == 2 or grid.pp > 1 else 0, words["rotary table"])

    def _has_rules(self) -> bool:
        names = (
            "mtp",
            "vocab_multiple",
            "rope_table",
            "mla_copies",
            "mxfp4_padding",
            "expert_width_floor",
            "shared_experts",
        )
        return any(name in self.engine.rules for name in names)

    def _left_out(self, at: Coordinate) -> list[Item]:
        """Layers for multi-token prediction that the engine doesn't load."""
        if self.engine.value("mtp") != "drop" or self.plan.mtp == "drop":
            return []
        grid, found = self.plan.grid, []
        tp, etp, slot = Share(at.tp, grid.tp), Share(at.etp, grid.etp), at.edp * grid.ep + at.ep
        for index in range(*self.plan.stages[at.stage]):
            if self.model.layers[index].mtp:
                slots = self.plan.experts.slots(index, grid)
                held = self.payload.layer(index, tp)
                held += (len(slots[slot]) if slots else 0) * self.payload.expert(index, etp)
                found.append(Item("weights", "not loaded (multi-token prediction)", index, exactly(-held)))
        return found

    def _vocabulary(self, at: Coordinate) -> list[Item]:
        """Rows of embedding and head that the engine pads the vocabulary with, otherwise than the shards do."""
        multiple = self.engine.value("vocab_multiple")
        if not multiple:
            return []
        grid, vocab, hidden = self.plan.grid, self.model.sizes["vocab"], self.model.sizes["hidden"]
        whole = -(-vocab // multiple) * multiple
        part = vocab if vocab % grid.tp == 0 else -(-vocab // (64 * grid.tp)) * 64 * grid.tp
        rows = whole // grid.tp - part // grid.tp
        ends = (at.stage == 0) + (at.stage == grid.pp - 1)
        if self.model.tied and grid.pp == 1:
            ends = 1
        return [Item("weights", "vocabulary padding", None, exactly(ends * rows * hidden * BF16))]

    def _tables(self) -> list[Item]:
        """Cosines and sines of every position."""
        rule = self.engine.value("rope_table")
        if not rule:
            return []
        held = rotary_tables(self.model) * int(rule["bits"]) // 8
        return [Item("weights", "rotary table", None, exactly(held))]

    def _latent_copies(self, layer: Layer, at: Coordinate) -> list[Item]:
        """MLA: what attention multiplies by instead of kv_b, or beside it."""
        rule = self.engine.value("mla_copies")
        quantised = (layer.index, "attn.kv_b") in self.formats
        if layer.words.get("attn") != "mla" or not rule:
            return []
        heads = -(-size(self.model, "heads") // self.plan.grid.tp)
        latent, nope, v_dim = size(self.model, "kv_lora"), size(self.model, "nope"), size(self.model, "v_dim")
        if rule == "dequantised":
            held = heads * (nope + v_dim) * latent * BF16 if quantised else 0
        else:
            query = self.model.sizes.get("q_lora") or self.model.sizes["hidden"]
            products = heads * latent * (query + self.model.sizes["hidden"])
            scales = 4 * (
                -(-query // 128) * heads * latent // 128 + heads * latent // 128 * self.model.sizes["hidden"] // 128
            )
            held = products + scales if quantised else products * BF16
            held += query * heads * size(self.model, "rope") * BF16
        return [Item("weights", "attn.kv_b as used", layer.index, exactly(held))]

    def _shared_experts(self, layer: Layer, at: Coordinate) -> list[Item]:
        """Shared experts beside latent attention (DeepSeek's) that every rank holds whole instead of its share."""
        latent = layer.words.get("attn") == "mla" and layer.words.get("shared") == "added"
        if self.engine.value("shared_experts") != "whole" or not latent:
            return []
        tp = self.plan.grid.tp
        whole = self.payload.operators(layer.index, Share(0, 1), Share(at.etp, self.plan.grid.etp), 0, (False, False))
        part = self.payload.operators(
            layer.index, Share(at.tp, tp), Share(at.etp, self.plan.grid.etp), 0, (False, False)
        )
        roles = [role for role in whole if role in ("shared.gate", "shared.up", "shared.down")]
        held = sum(whole[role] - part[role] for role in roles)
        return [Item("weights", "shared experts whole", layer.index, exactly(held))]

    def _padded_experts(self, layer: Layer, at: Coordinate) -> list[Item]:
        """MXFP4 experts whose rows and widths a kernel wants in whole tiles."""
        stored = self.formats.get((layer.index, "experts.down"))
        if layer.words.get("ffn") != "moe" or stored is None:
            return []
        grid, row = self.plan.grid, self.model.sizes.get("latent", self.model.sizes["hidden"])
        width = -(-size(self.model, "expert_ffn") // grid.etp)
        wide, tall = width, row
        padding, floor = self.engine.value("mxfp4_padding"), self.engine.value("expert_width_floor") or {}
        if padding and stored.name == "mxfp4_blocks":
            wide, tall = _up(width, padding["width"]), _up(row, padding["rows"])
        if grid.ep == 1 and stored.name in floor:
            wide = max(wide, floor[stored.name])
        slots = self.plan.experts.slots(layer.index, grid)
        held = len(slots[at.edp * grid.ep + at.ep]) if slots else 0
        block = stored.block[1]
        per_value = 4 * block + 8  # bits of a block with its scale
        values = 3 * (wide * tall - width * row) * per_value // block // 8
        biases = BF16 * (2 * (wide - width) + tall - row) if "experts.down.bias" in self.biased else 0
        return [Item("weights", "experts padded", layer.index, exactly(held * (values + biases)))]


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
