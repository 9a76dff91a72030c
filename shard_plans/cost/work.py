"""What one rank computes and reads for a layer: weights of matrix products, attention over the cache."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from shard_plans.checkpoints.dtypes import DTYPE_BITS
from shard_plans.families.binding import Binding
from shard_plans.families.dims import Share, take
from shard_plans.families.model import Layer, Model
from shard_plans.families.parameter import Parameter

LONE = 1 << 40
"""Tokens behind a compressed record where a layer keeps none: its window alone is seen."""
RECURRENT_FLOPS = 7
"""FLOPs of a token for each number of a linear attention's state: decay, k S, k (v - k S), their sum, and q S."""


@dataclass(frozen=True, slots=True)
class Matrices:
    """Matrix products of one group of weights on one rank."""

    values: int
    """Weight values; a token costs two FLOPs each."""
    bytes: float
    """As stored, scales included."""
    rate: str
    """The type they are multiplied in: bf16, fp8 or fp4."""
    kernels: int


@dataclass(frozen=True, slots=True)
class Attention:
    """FLOPs of attention beside its projections, on one tp rank."""

    prefill_pair: float = 0
    """Of one query token and one visible token, keys and values expanded."""
    decode_pair: float = 0
    """The same at decode; for MLA in the latent space."""
    token: float = 0
    """Of one token whatever it sees: a recurrent state."""
    index_pair: float = 0
    """Of one query token and one record that an indexer scores."""
    window: int | None = None
    """Tokens that are attended to as they are, at most."""
    every: int = 0
    """Compressed attention: tokens behind one further record; 0: no such records."""
    picked: int | None = None
    """Records that an indexer lets through, at most."""

    def flops(self, visible: float, decode: bool) -> float:
        """FLOPs of one query token that may see `visible` tokens."""
        records = visible / self.every if self.every else visible
        seen = records if self.picked is None else min(records, self.picked)
        if self.every:
            seen += min(visible, self.window or 0)
        elif self.window is not None:
            seen = min(seen, self.window)
        return seen * (self.decode_pair if decode else self.prefill_pair) + records * self.index_pair + self.token


@dataclass(frozen=True, slots=True)
class LayerWork:
    """One layer on one rank."""

    dense: tuple[Matrices, ...]
    expert: Matrices | None
    """One expert, for an etp member; None in a dense layer."""
    attention: Attention


class Work:
    """The work of a binding's layers under any tp and etp; layers alike are counted once."""

    def __init__(self, binding: Binding) -> None:
        self.binding = binding
        self._known: dict[tuple[int, int, int], LayerWork] = {}
        self._head: dict[int, Matrices | None] = {}
        here: dict[int, list[Parameter]] = {}
        for parameter in binding.parameters:
            if parameter.layer is not None:
                here.setdefault(parameter.layer, []).append(parameter)
        signatures: dict[object, int] = {}
        self._example: list[tuple[Layer, list[Parameter]]] = []
        kinds = []
        for layer in binding.model.forward_layers:
            stored = here.get(layer.index, [])
            words = tuple(sorted((word, str(value)) for word, value in layer.words.items()))
            signature = (words, tuple((p.role, _form(p)) for p in stored))
            if signature not in signatures:
                signatures[signature] = len(self._example)
                self._example.append((layer, stored))
            kinds.append(signatures[signature])
        self.kinds = tuple(kinds)
        """Of each layer that runs, the number of its kind."""
        self.examples = tuple(layer for layer, _ in self._example)
        """One layer of each kind."""

    def kind(self, kind: int, tp: int, etp: int) -> LayerWork:
        """The work of a layer of this kind on a rank of tp and etp members."""
        key = (kind, tp, etp)
        if key not in self._known:
            layer, stored = self._example[kind]
            groups: dict[tuple[str, str], list[Parameter]] = {}
            for parameter in stored:
                if len(parameter.dims) >= 2 and not parameter.per_expert:
                    groups.setdefault((parameter.group, rate(parameter)), []).append(parameter)
            experts = [parameter for parameter in stored if parameter.per_expert]
            self._known[key] = LayerWork(
                tuple(self._matrices(group, "tp", tp) for group in groups.values()),
                self._matrices(experts, "etp", etp) if experts else None,
                attention(layer, self.binding.model, tp),
            )
        return self._known[key]

    def head(self, tp: int) -> Matrices | None:
        """The product that makes logits; of a tied model the embedding's."""
        if tp not in self._head:
            outside = [p for p in self.binding.parameters if p.layer is None and p.number is None]
            heads = [p for p in outside if p.role == "head"] or [p for p in outside if p.role == "embed"]
            self._head[tp] = self._matrices(heads[:1], "tp", tp) if heads else None
        return self._head[tp]

    def _matrices(self, parameters: Iterable[Parameter], axis: str, count: int) -> Matrices:
        values, stored, kernels, found = 0, 0.0, 0, "bf16"
        for parameter in parameters:
            sizes, uneven = self.binding.model.sizes, self.binding.family.uneven
            here = math.prod(take(dim, sizes, uneven, {axis: Share(0, count)}).length for dim in parameter.dims)
            values += here
            stored += here * _bytes_a_value(parameter)
            kernels, found = kernels + 1, rate(parameter)
        return Matrices(values, stored, found, kernels)


def rate(parameter: Parameter) -> str:
    """The type that a parameter is multiplied in: fp8 where its values are FP8, fp4 for NVFP4, else bf16."""
    if parameter.format is not None and parameter.format.name.startswith("nvfp4"):
        return "fp4"
    return "fp8" if parameter.parts[0].dtype.startswith("F8_E4M3") else "bf16"


def _form(parameter: Parameter) -> tuple[object, ...]:
    return (tuple(dim.text for dim in parameter.dims), tuple((p.dtype, p.shape) for p in parameter.parts))


def _bytes_a_value(parameter: Parameter) -> float:
    pack = parameter.format.pack if parameter.format is not None else 1
    values = math.prod(parameter.parts[0].shape) * pack
    stored = sum(math.prod(part.shape) * DTYPE_BITS[part.dtype] / 8 for part in parameter.parts)
    return stored / values if values else 0.0


def attention(layer: Layer, model: Model, tp: int) -> Attention:
    """FLOPs of a layer's attention on a rank; of a kind that isn't known only the cache that it reads counts."""
    sizes, words = model.sizes, layer.words
    heads = -(-sizes.get("heads", 0) // tp)
    window = words.get("window") or words.get("chunk")
    bounds = Attention(
        index_pair=2 * sizes.get("index_heads", 0) * sizes.get("index_dim", 0) if words.get("index") == "dsa" else 0,
        window=int(window) if window else None,
        picked=picked(layer),
    )
    if words.get("attn") == "mla":
        expanded = sizes["nope"] + sizes["rope"] + sizes["v_dim"]
        latent = 2 * sizes["kv_lora"] + sizes["rope"]
        return replace(bounds, prefill_pair=2 * heads * expanded, decode_pair=2 * heads * latent)
    if words.get("attn") == "kda":
        return Attention(token=RECURRENT_FLOPS * -(-sizes["kda_heads"] // tp) * sizes["kda_dim"] ** 2)
    if words.get("attn") == "gdn":
        values = sizes["key_heads"] * sizes["per_key"]
        return Attention(token=RECURRENT_FLOPS * -(-values // tp) * sizes["dk"] * sizes["dv"])
    if words.get("attn") == "compressed":
        heads = -(-sizes["groups"] * sizes["group_heads"] // tp)
        bounds = replace(bounds, every=int(words.get("compress") or 0) or LONE)
    pair = 4 * heads * sizes.get("head_dim", 0)
    return replace(bounds, prefill_pair=pair, decode_pair=pair)


def picked(layer: Layer) -> int | None:
    """Records that a layer's indexer lets through; None where it has none, or the table doesn't say how many."""
    if layer.words.get("index") not in ("dsa", "previous", "block") or not layer.words.get("index_topk"):
        return None
    return int(layer.words["index_topk"]) * int(layer.words.get("index_block") or 1)
