"""How likely a model finds texts: of each of them, and beside the reference."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runtime.checking.compare import divergence, log_likelihood


@dataclass(frozen=True, slots=True)
class TextFigures:
    """One text; natural logarithms, means over its tokens but the first."""

    tokens: int
    log_likelihood: float | None
    """None for a single token."""
    reference_log_likelihood: float | None = None
    """None without a reference."""
    divergence: float | None = None
    """Kullback-Leibler divergence of the logits from the reference's, nats a token, over all tokens."""

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it: what isn't a finite number is null."""
        values = (self.log_likelihood, self.reference_log_likelihood, self.divergence)
        likelihood, theirs, parted = (None if x is None or not math.isfinite(x) else x for x in values)
        return {
            "tokens": self.tokens, "log_likelihood": likelihood, "reference_log_likelihood": theirs,
            "divergence": parted,
        }  # fmt: skip


def text_figures(logits: Tensor, texts: Sequence[Tensor], reference: Tensor | None) -> Iterator[TextFigures]:
    """Of each of the `texts` (ids [tokens]), whose logits [tokens, vocabulary] lie one behind the other."""
    sizes = [len(ids) for ids in texts]
    theirs = [None] * len(texts) if reference is None else torch.split(reference, sizes)
    for ids, ours, other in zip(texts, torch.split(logits, sizes), theirs, strict=True):
        several = len(ids) > 1
        yield TextFigures(
            len(ids), log_likelihood(ours, ids) if several else None,
            None if other is None or not several else log_likelihood(other, ids),
            None if other is None else divergence(ours, other),
        )  # fmt: skip


def mean_likelihood(logits: Tensor, texts: Sequence[Tensor]) -> float:
    """Mean log-likelihood of all tokens but the first of each text; nan where every text is a single token."""
    found = [(text.log_likelihood, text.tokens - 1) for text in text_figures(logits, texts, None)]
    count = sum(tokens for _, tokens in found)
    return sum(mean * tokens for mean, tokens in found if mean is not None) / count if count else math.nan
