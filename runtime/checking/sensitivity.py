"""Which group of weights costs how much when it alone is stored in 8 bits: passes of the reference, side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runtime.blocks import forward
from runtime.blocks.piece import Piece
from runtime.blocks.places import whole_pieces
from runtime.blocks.weights import LayerWeights
from runtime.checking.compare import cosine, divergence
from runtime.checking.likelihood import mean_likelihood
from runtime.checking.reference import Reference
from runtime.checking.rounded import rounded
from shard_plans.console import Advance
from shard_plans.families.model import Layer
from shard_plans.families.weights import MATRICES, OUTER, formats

EIGHT_BITS = ("fp8_block", "int8_channel")
"""Formats that are tried (docs/precision.md)."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What it costs to store one group of weights in one format, and all others as the checkpoint does."""

    group: str
    format: str
    divergence: float
    """Kullback-Leibler divergence of the logits, nats a token."""
    likelihood: float
    """By how much the mean log-likelihood of the texts rises (or falls, below 0); nan for texts of one token."""
    cosine: float
    """Of the logits."""
    alike: float | None
    """Part of the routes that stay; None without routers."""

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it: what isn't a finite number is null."""
        found = {
            "divergence": self.divergence, "log_likelihood": self.likelihood, "cosine": self.cosine,
            "routes_alike": self.alike,
        }  # fmt: skip
        kept = {name: value if value is not None and math.isfinite(value) else None for name, value in found.items()}
        return {"group": self.group, "format": self.format, **kept}


@dataclass(slots=True, eq=False)
class _Variant:
    """One pass."""

    group: str | None
    """None: all weights as the checkpoint has them."""
    format: str
    pieces: Sequence[Piece]
    x: Tensor
    alike: int = 0
    routed: int = 0


def sensitivity(reference: Reference, texts: Sequence[Tensor], advance: Advance | None = None) -> list[Cost]:
    """The cost of each group in each of EIGHT_BITS, over the texts (ids [tokens]); costliest first.

    All passes go through a layer while its weights are in memory, so that the checkpoint is read once. Groups: those
    that the model has of MATRICES and OUTER; a tied embedding is head too.
    """
    ctx, layers = reference.context, reference.context.model.forward_layers
    with torch.no_grad():
        variants = _begin(reference, reference.outside("first"), [text.to(ctx.device) for text in texts])
        for layer in layers:
            _through(reference, layer, reference.weights(layer.index), variants)
            if advance is not None:
                advance(layer.index + 1, len(layers))
        return _costs(reference, reference.outside("last"), variants, texts)


def _begin(reference: Reference, first: LayerWeights, texts: Sequence[Tensor]) -> list[_Variant]:
    """A pass with all weights as they are, and one for each group and format, in front of the first layer."""
    ctx, groups, ids = reference.context, reference.groups, torch.cat(list(texts))
    tried = [group for group in (*MATRICES, *OUTER) if group in groups.values()]
    variants = []
    for group, format in ((None, ""), *((group, format) for group in tried for format in EIGHT_BITS)):
        x = forward.embed(ctx, _weights(first, groups, group, format, {}), ids)
        variants.append(_Variant(group, format, whole_pieces(ctx.model, texts), x))
    return variants


def _through(reference: Reference, layer: Layer, loaded: LayerWeights, variants: Sequence[_Variant]) -> None:
    """All passes through one layer."""
    base: Tensor | None = None
    for one in variants:
        weights = _weights(loaded, reference.groups, one.group, one.format, layer.words)
        one.x, routing = forward.run_pieces(reference.context, layer, weights, one.x, one.pieces)
        if routing is not None:
            chosen = routing.indices.sort(dim=-1).values
            base = chosen if base is None else base
            one.alike += int((chosen == base).all(dim=-1).sum())
            one.routed += len(chosen)


def _costs(
    reference: Reference, last: LayerWeights, variants: Sequence[_Variant], texts: Sequence[Tensor]
) -> list[Cost]:
    """Behind the last layer: each pass against the first, costliest first."""
    costs, theirs, known = list[Cost](), None, math.nan
    for one in variants:
        weights = _weights(last, reference.groups, one.group, one.format, {})
        logits = forward.logits(reference.context, weights, one.x)
        likelihood = mean_likelihood(logits, texts)
        if theirs is None or one.group is None:
            theirs, known = logits, likelihood
            continue
        alike = one.alike / one.routed if one.routed else None
        parted, angle = divergence(logits, theirs), cosine(logits, theirs)
        costs.append(Cost(one.group, one.format, parted, likelihood - known, angle, alike))
    return sorted(costs, key=lambda cost: -cost.divergence)


def _weights(
    loaded: LayerWeights, groups: Mapping[str, str], group: str | None, format: str, words: Mapping[str, Any]
) -> LayerWeights:
    """Those of a section with one group rounded."""
    if group is None:
        return loaded
    target, turned = formats()[format], words.get("expert_sides") == "in_out_unless_packed"
    return {
        role: rounded(stored, target, turned and role.startswith("experts.")) if groups.get(role) == group else stored
        for role, stored in loaded.items()
    }
