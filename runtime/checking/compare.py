"""Error measures of the verification ladder, and which routing differences rounding can explain."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.blocks.router import Routing

FLOOR = 1e-3
"""Least part of a token's residual stream that its layer's contribution is measured against."""
SLAB = 1 << 22
"""Elements that are compared at a time."""
NOISE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Score differences that rounding explains, as a part of a token's largest score, by compute type."""


def _wide(x: Tensor) -> Tensor:
    """In float64 on the CPU: not every accelerator has that type."""
    return x.detach().cpu().double()


def _slabs(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Some rows of each at a time, in float64: the whole of a long text's logits may be many times what is needed."""
    rows = len(tensors[0])
    step = max(1, SLAB * rows // max(1, tensors[0].numel()))
    for start in range(0, rows, step):
        yield tuple(_wide(x[start : start + step]) for x in tensors)


def relative(ours: Tensor, reference: Tensor) -> float:
    """||ours - reference|| / ||reference|| over all elements; nan where either isn't finite."""
    size = error = 0.0
    for x, y in _slabs(ours, reference):
        size += float(y.square().sum())
        error += float((x - y).square_().sum())
    size, error = math.sqrt(size), math.sqrt(error)
    return error / size if size > 0 else (0.0 if error == 0 else math.inf if error == error else math.nan)


def cosine(ours: Tensor, reference: Tensor) -> float:
    """Cosine of the angle between the two, over all elements; nan where either isn't finite."""
    sizes, product = [0.0, 0.0], 0.0
    for x, y in _slabs(ours, reference):
        sizes = [sizes[0] + float(x.square().sum()), sizes[1] + float(y.square().sum())]
        product += float((x * y).sum())
    size = math.sqrt(sizes[0]) * math.sqrt(sizes[1])
    return product / size if size != 0 else math.nan


def layer_error(start: Tensor, ours: Tensor, reference: Tensor) -> tuple[float, int]:
    """Worst relative error of what a layer added to one token, and the token; all [tokens, .., hidden].

    Both sides added to `start`, so the error is measured against the layer's own contribution: the residual stream,
    which is often far larger, can't dilute it. A contribution below FLOOR of the stream is measured against that.
    """
    start, ours, reference = (_wide(x).flatten(1) for x in (start, ours, reference))
    added = torch.maximum((reference - start).norm(dim=-1), FLOOR * reference.norm(dim=-1))
    errors = (ours - reference).norm(dim=-1) / added.clamp_min(torch.finfo(torch.float64).tiny)
    if not bool(torch.isfinite(errors).all()):
        return math.nan, int((~torch.isfinite(errors)).nonzero()[0])
    token = int(errors.argmax())
    return float(errors[token]), token


def row_errors(ours: Tensor, reference: Tensor) -> Tensor:
    """Relative error of each token [tokens], float64 on the CPU; both [tokens, ..]."""
    ours, reference = _wide(ours).flatten(1), _wide(reference).flatten(1)
    sizes: Tensor = reference.norm(dim=-1).clamp_min(torch.finfo(torch.float64).tiny)
    errors: Tensor = (ours - reference).norm(dim=-1) / sizes
    return errors


def operator_error(ours: Tensor, reference: Tensor) -> tuple[float, int]:
    """Worst relative error of what an operator made of one token, and the token; both [tokens, ..].

    What is below FLOOR of the largest token's is measured against that. Scores of -inf (experts of groups that a router
    dropped) are left out on both sides.
    """
    ours, reference = _wide(ours).flatten(1), _wide(reference).flatten(1)
    dropped = ours.isneginf() | reference.isneginf()
    ours, reference = ours.masked_fill(dropped, 0), reference.masked_fill(dropped, 0)
    sizes = reference.norm(dim=-1)
    tiny = torch.finfo(torch.float64).tiny
    errors = (ours - reference).norm(dim=-1) / sizes.clamp_min(max(FLOOR * float(sizes.max()), tiny))
    if not bool(torch.isfinite(errors).all()):
        return math.nan, int((~torch.isfinite(errors)).nonzero()[0])
    token = int(errors.argmax())
    return float(errors[token]), token


def divergence(ours: Tensor, reference: Tensor) -> float:
    """Mean Kullback-Leibler divergence of `ours` from `reference` in nats a token; both logits [tokens, vocabulary]."""
    found = 0.0
    for slabs in _slabs(ours, reference):
        x, y = (torch.log_softmax(slab, dim=-1) for slab in slabs)
        found += float((y.exp() * (y - x)).sum())
    return found / len(ours)


def log_likelihood(logits: Tensor, ids: Tensor) -> float:
    """Mean natural log of the probability that `logits` [tokens, vocabulary] give each next id; nan for one token."""
    following, found, start = ids[1:, None].cpu(), 0.0, 0
    for (slab,) in _slabs(logits[:-1]):
        scores = torch.log_softmax(slab, dim=-1)
        found += float(scores.gather(1, following[start : start + len(slab)]).sum())
        start += len(slab)
    return found / start if start else math.nan


@dataclass(frozen=True, slots=True)
class Routed:
    """How one layer's routing compares with the reference's."""

    tokens: int
    wrong: tuple[int, ...]
    """Tokens sent to other experts although the margin exceeds rounding."""
    ties: tuple[int, ...]
    """Tokens sent to other experts where the margin is within rounding."""
    margin: float
    """The reference's smallest margin of all tokens, as a part of the token's largest score."""


def relative_margin(routing: Routing) -> Tensor:
    """[tokens], on the CPU: the routing's margin as a part of the token's largest score."""
    scores = _wide(routing.scores_for_choice)
    largest = scores.masked_fill(~torch.isfinite(scores), 0).abs().amax(dim=-1)
    return _wide(routing.margin) / largest.clamp_min(torch.finfo(torch.float64).tiny)


def compare_routing(ours: Tensor, reference: Tensor, margin: Tensor, noise: float | Tensor) -> Routed:
    """Compare expert ids [tokens, k], whatever their order; `margin` [tokens] is the reference's, `noise` what rounding
    explains of it, for all tokens or each [tokens].
    """
    ours, reference, margin = ours.cpu(), reference.cpu(), margin.cpu()
    if ours.shape != reference.shape:  # another number of experts a token
        return Routed(len(reference), tuple(range(len(reference))), (), float(margin.min()))
    differ = (ours.sort(dim=-1).values != reference.sort(dim=-1).values).any(dim=-1)
    explained = differ & (margin <= noise)
    return Routed(
        len(differ),
        tuple(int(t) for t in (differ & ~explained).nonzero().flatten()),
        tuple(int(t) for t in explained.nonzero().flatten()),
        float(margin.min()) if len(margin) else math.inf,
    )
