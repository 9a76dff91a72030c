"""The router: which experts a token goes to, and with what weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shard_plans.errors import RuntimeFault

SCORES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: functional.softplus(logits).sqrt(),
    "hash": lambda logits: functional.softplus(logits).sqrt(),
    "softmax_of_topk": lambda logits: logits,
    "sigmoid_on_input": lambda logits: logits,
}
"""Word `score` -> scores of all experts [T, experts] from the product with the router's weight."""
OF_CHOSEN: Mapping[str, Callable[[Tensor], Tensor]] = {
    "softmax_of_topk": lambda chosen: chosen.softmax(-1),
    "sigmoid_on_input": torch.sigmoid,
}
"""The same -> scores of the experts chosen [T, k], where these are taken of the chosen alone."""


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """Where the tokens of one layer went."""

    indices: Tensor
    """[T, k] int64, global expert ids."""
    weights: Tensor
    """[T, k], float32 or higher: renormalised and scaled."""
    scores_for_choice: Tensor
    """[T, experts], float32 or higher: what the choice was made by (bias added; experts of dropped groups are -inf)."""
    margin: Tensor
    """[T]: by how much the last chosen expert beats the best one left out, or, if that is closer, the last chosen group
    the best one left out; rounding below this can't change the choice. inf where nothing is left out."""


def route(
    words: Mapping[str, Any], topk: int, x: Tensor, weight: Tensor, bias: Tensor | None, given: Tensor | None = None
) -> Routing:
    """Score the tokens x [T, hidden] against `weight` [experts, hidden] and choose `topk` experts each.

    All arguments in float32 or higher. Words: score; groups, topk_groups, group_score (top2_sum, max); renormalize;
    scale. The bias changes the choice alone, as in DeepSeek-V3, or with `router_bias: logits` is part of the product.
    `softmax_of_topk` and `sigmoid_on_input` choose by the product and score what was chosen. `hash` doesn't choose:
    the experts are `given` [T, topk].
    """
    logits = functional.linear(x, weight)
    if words.get("router_bias") == "logits" and bias is not None:
        logits, bias = logits + bias, None
    scores = SCORES[words["score"]](logits)
    choice = scores if bias is None else scores + bias
    margin = choice.new_full((x.shape[0],), float("inf"))
    groups = words.get("groups") or 1
    if groups > 1:
        choice, margin = _limit_groups(choice, groups, words)
    if topk > choice.shape[1]:
        raise RuntimeFault(f"the router is to choose {topk} of {choice.shape[1]} experts")
    if given is None:
        indices = choice.topk(topk, dim=-1).indices
        margin = torch.minimum(margin, _lead(choice, topk))
    else:
        indices = given
    chosen = scores.gather(1, indices)
    if words["score"] in OF_CHOSEN:
        chosen = OF_CHOSEN[words["score"]](chosen)
    if words.get("renormalize"):
        chosen = chosen / _total(words, chosen)
    scale = words.get("scale")
    return Routing(indices, chosen if scale is None else chosen * scale, choice, margin)


def _total(words: Mapping[str, Any], chosen: Tensor) -> Tensor:
    """What the chosen scores [T, k] are divided by: their sum, kept off 0, or no less than `renormalize_min`."""
    total = chosen.sum(-1, keepdim=True)
    return total.clamp_min(words["renormalize_min"]) if words["renormalize"] == "clamp" else total + 1e-20


def _limit_groups(choice: Tensor, groups: int, words: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The scores with all but the best groups at -inf, and by how much the last of those leads [T]."""
    tokens, experts = choice.shape
    kept = words.get("topk_groups") or groups
    if experts % groups or kept > groups:
        raise RuntimeFault(f"the router can't choose {kept} of {groups} groups of {experts} experts")
    grouped = choice.view(tokens, groups, experts // groups)
    if words.get("group_score") == "top2_sum":
        if experts // groups < 2:
            raise RuntimeFault(f"group_score top2_sum needs 2 experts a group; {groups} groups share {experts}")
        group_scores = grouped.topk(2, dim=-1).values.sum(-1)
    else:
        group_scores = grouped.amax(-1)
    dropped = torch.ones_like(group_scores, dtype=torch.bool)
    dropped.scatter_(1, group_scores.topk(kept, dim=-1).indices, False)
    limited = grouped.masked_fill(dropped[:, :, None], float("-inf")).view(tokens, experts)
    return limited, _lead(group_scores, kept)


def _lead(scores: Tensor, count: int) -> Tensor:
    """By how much the count-th best score leads the next one [T]; inf where there is none."""
    if count >= scores.shape[1]:
        return scores.new_full((scores.shape[0],), float("inf"))
    best = scores.topk(count + 1, dim=-1).values
    lead = best[:, -2] - best[:, -1]
    return lead.masked_fill(lead.isnan(), 0.0)
