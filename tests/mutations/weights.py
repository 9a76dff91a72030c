"""Bugs of stored weights: wrong in the files under right digests, or only in the memory of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runtime.blocks.context import RankContext
from runtime.blocks.weights import Stored
from tests.mutations import edits
from tests.mutations.bug import EMBEDDING, HEAD, Bug, Site
from tests.mutations.code import twist_layer
from tests.mutations.edits import Edit
from tests.tools import tamper

PLAIN = {"BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16}


@dataclass(frozen=True, slots=True)
class Row:
    """An edit, and the tensors that it is made to: one of them, or a matrix and its scales alike."""

    name: str
    place: str
    edit: Edit
    roles: tuple[str, ...]
    with_scales: bool = False
    like: str = ""

    def found(self, site: Site) -> list[str]:
        """Tensors of the layer that it can be made to."""
        return [role for role in self.roles if role in site.shapes and _differs(self.edit, site.shapes[role], site)]

    def bug(self) -> Bug:
        """As the table has it."""
        return Bug(self.name, self.place, lambda site: bool(self.found(site)), self._inject, like=self.like)

    def _inject(self, site: Site) -> None:
        role = site.dice.choice(self.found(site))
        names = [role, f"{role}.scale"] if self.with_scales and f"{role}.scale" in site.shapes else [role]
        seed = site.dice.random()

        def edit(x: Tensor) -> Tensor:
            site.dice.seed(seed)  # a matrix and its scales go the same way
            return self.edit(site, x)

        if site.dice.random() < 0.5 or self.place in (EMBEDDING, HEAD):
            in_files(site, names, edit)
        else:
            in_memory(site, names, edit)


def _differs(edit: Edit, shape: tuple[int, ...], site: Site) -> bool:
    """Whether the edit changes a tensor of that shape, and not its shape."""
    if edit in (edits.next_row, edits.strided) and shape[-2 if len(shape) > 1 else 0] < 2:
        return False
    if edit in (edits.next_block, edits.first_block) and shape[-1] < 2:
        return False
    if edit is edits.nibbles:
        return len(shape) == 4
    if edit is edits.by_kind:
        return site.model.sizes["key_heads"] > site.opened.plan.grid.tp
    if edit is edits.turned and (len(shape) < 2 or shape[-1] != shape[-2]):
        return False
    if edit in (edits.exchange_heads, edits.exchange_outputs):
        return edits.head_rows(site)[0] > 1
    return not (edit in (edits.exchange_experts, edits.next_expert, edits.next_element) and shape[0] < 2)


def in_files(site: Site, names: list[str], edit: Any) -> None:
    """Spoil the file from which the rank has the tensors; digests are made anew."""
    outside = names[0] in ("embed", "head", "norm") or names[0].startswith("vision.")
    prefix = "" if outside else f"layers.{site.layer.index}."
    entry = site.opened.root.ranks[site.rank]
    for name in names:
        file = next(f for f, n in tamper.find(site.out, prefix + name) if n == prefix + name and f in entry.files)
        with tamper.opened(site.out, file) as shard:
            stated = shard.entry(prefix + name)
            raw = np.frombuffer(shard.data[prefix + name], np.uint8).copy()
            x = torch.from_numpy(raw).view(PLAIN.get(stated["dtype"], torch.uint8))
            x = x.view(torch.int32) if stated["dtype"] == "I32" else x
            made = edit(x.view(stated["shape"])).contiguous()
            shard.data[prefix + name] = made.view(torch.uint8).numpy().tobytes()


def in_memory(site: Site, names: list[str], edit: Any) -> None:
    """Spoil what this rank was loaded, in the one layer."""

    def spoil(ctx: RankContext, weights: Mapping[str, Any]) -> Mapping[str, Any]:
        if ctx.at.rank != site.rank:
            return weights
        made = dict(weights)
        for name in names:
            role = name.removesuffix(".scale")
            stored = made[role]
            assert isinstance(stored, Stored)
            if name == role:
                made[role] = replace(stored, values=_as_stored(stored.values, edit))
            else:
                assert stored.scale is not None
                made[role] = replace(stored, scale=_as_stored(stored.scale, edit))
        return made

    twist_layer(site.patch, site.layer.index, weights=spoil)


def _as_stored(x: Tensor, edit: Any) -> Tensor:
    """The edit of a tensor, float8 as bytes."""
    bare = x.is_floating_point() and x.element_size() == 1
    made: Tensor = edit(x.view(torch.uint8) if bare else x)
    return made.view(x.dtype) if bare else made


GATE_UP = ("mlp.gate_up", "shared.gate_up", "experts.gate_up")
MATRICES = (
    "attn.o", "attn.q_a", "attn.q_b", "attn.q", "attn.kv_a", "attn.kv_b", "attn.qkv", "mlp.gate_up", "mlp.down",
    "shared.gate_up", "shared.down", "kda.q", "kda.v", "gdn.qkvz",
)  # fmt: skip
ATTENTION = tuple(name for name in MATRICES if not name.startswith(("mlp", "shared")))
QUERIES = ("attn.qkv", "attn.q", "attn.q_b", "kda.q")
EXPERTS = ("experts.gate_up", "experts.down")
NORMS = ("attn.q_norm", "attn.k_norm", "attn.q_a_norm", "attn.kv_a_norm", "kda.o_norm", "gdn.norm")
SCALES = tuple(f"{name}.scale" for name in ATTENTION)
EXPERT_SCALES = tuple(f"{name}.scale" for name in (*GATE_UP, *EXPERTS))
ROWS = (
    Row("two experts exchanged", "ffn", edits.exchange_experts, EXPERTS, True),
    Row("every expert the next one", "ffn", edits.next_expert, EXPERTS, True),
    Row("experts dropped", "ffn", edits.zero, EXPERTS, like="Megatron-LM 5844"),
    Row("half of each expert's rows", "ffn", edits.half_of_each, EXPERTS, like="sglang 36438"),
    Row("gate for up", "ffn", edits.gate_for_up, GATE_UP, True),
    Row("pairs for halves", "ffn", edits.pairs_for_halves, GATE_UP, True),
    Row("expert's bias lost", "ffn", edits.zero, ("experts.gate_up.bias", "experts.down.bias")),
    Row("expert's bias the next one's", "ffn", edits.next_expert, ("experts.gate_up.bias", "experts.down.bias")),
    Row("router's bias zero", "ffn", edits.zero, ("moe.router_bias", "moe.router.bias")),
    Row("router's bias in bf16", "ffn", edits.rounded, ("moe.router_bias",), like="sglang 37133, vllm 50761"),
    Row("router one expert off", "ffn", edits.next_row, ("moe.router",)),
    Row("shared expert lost", "ffn", edits.zero, ("shared.down",)),
    Row("shared expert's gate lost", "ffn", edits.zero, ("shared.router",)),
    Row("two query heads exchanged", "attn", edits.exchange_heads, QUERIES),
    Row("outputs of two heads exchanged", "attn", edits.exchange_outputs, ("attn.o",)),
    Row("keys for values", "attn", edits.key_for_value, ("attn.qkv",)),
    Row("strided slice", "attn", edits.strided, ATTENTION, like="transformers 37051"),
    Row("rows for columns", "attn", edits.turned, ATTENTION),
    Row("rows one off", "attn", edits.next_row, ATTENTION),
    Row("attention's bias lost", "attn", edits.zero, ("attn.qkv.bias", "attn.o.bias", "index.k_norm.bias")),
    Row("sinks lost", "attn", edits.zero, ("attn.sinks",)),
    Row("sinks of the next head", "attn", edits.next_element, ("attn.sinks",)),
    Row("norm 1 % off", "attn", edits.off, ("attn.norm",)),
    Row("norm of the experts 1 % off", "ffn", edits.off, ("ffn.norm",)),
    Row("inner norm left out", "attn", edits.ones, NORMS),
    Row("scales one block off", "attn", edits.next_row, SCALES, like="vllm 53242, 52997, 52915"),
    Row("experts' scales one block off", "ffn", edits.next_row, EXPERT_SCALES),
    Row("scales not cut along columns", "ffn", edits.first_block, EXPERT_SCALES, like="vllm 41511"),
    Row("scales of the block beside", "ffn", edits.next_block, EXPERT_SCALES),
    Row("nibbles exchanged", "ffn", edits.nibbles, EXPERTS),
    Row("taps backwards", "attn", edits.reversed_taps, ("kda.q_conv", "kda.k_conv", "kda.v_conv", "gdn.conv")),
    Row("decay of the next head", "attn", edits.next_element, ("kda.A_log", "gdn.A_log")),
    Row("time step's bias lost", "attn", edits.zero, ("kda.dt_bias", "gdn.dt_bias")),
    Row("rows by kind, not by head", "attn", edits.by_kind, ("gdn.qkvz", "gdn.ba"), like="vllm 36242"),
    Row("not a number", "attn", edits.not_a_number, ("attn.norm", "attn.qkv.bias")),
    Row("vocabulary one row off", EMBEDDING, edits.next_row, ("embed",)),
    Row("embedding of the rank lost", EMBEDDING, edits.zero, ("embed",)),
    Row("16 rows of the head lost", HEAD, edits.lost_rows, ("head",)),
    Row("last norm 1 % off", HEAD, edits.off, ("norm",)),
)
WEIGHTS = tuple(row.bug() for row in ROWS)
