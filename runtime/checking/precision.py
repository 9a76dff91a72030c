"""What a change of precision does to a model: layers with converted weights beside those of the checkpoint's own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from runtime.blocks import forward
from runtime.checking.checks import Check, Measure, make_check
from runtime.checking.compare import cosine
from runtime.checking.likelihood import mean_likelihood
from runtime.checking.reference import Reference
from shard_plans.documents.conversions import ConvertedTensor
from shard_plans.families.weights import formats

NAME = "precision"
COSINE, FOUR_BITS = 0.99, 0.9
"""The least that a layer's output may be like that of the checkpoint's own weights; where weights have 4 bits."""
PACKED = ("U8", "I32")
"""Types of values that hold numbers of 4 bits."""


def judge_precision(
    own: Reference, converted: Reference, texts: Sequence[Tensor], logits: Tensor | None,
    lossy: Sequence[ConvertedTensor], weights: Mapping[str, str],
) -> Check:  # fmt: skip
    """Each layer with converted weights, fed with the input that it has in the pass of the checkpoint's own (`own`).

    `logits` are those that the ranks computed; how far they went from the checkpoint's is told, not judged: that grows
    with every layer, and with every near-tie of a router.
    """
    own.begin_all(texts)
    found = list[Measure]()
    with torch.no_grad():
        for layer in own.context.model.forward_layers:
            record = own.next_layer()
            loaded = converted.weights(layer.index)
            out, _ = forward.run_pieces(converted.context, layer, loaded, record.start, record.pieces)
            found.append(Measure(NAME, cosine(out, record.out), f"layer {layer.index}"))
        theirs = own.logits()
    packed = {format.format for format in formats().values() if format.values in PACKED}
    limit = FOUR_BITS if any(tensor.made in packed for tensor in lossy) else COSINE
    words = ", ".join(f"{group}: {name}" for group, name in weights.items())
    note = f"least cosine of a layer with converted weights ({words}) to the checkpoint's, fed with the same input"
    if logits is not None:
        note += f"; end to end the logits' cosine is {cosine(logits, theirs):.4f}"
        before, after = mean_likelihood(theirs, texts), mean_likelihood(logits, texts)
        if math.isfinite(before):
            note += f", the log-likelihood goes from {before:.4f} to {after:.4f}"
    check = make_check(NAME, found, limit, f"{note}; a smoke test", high=False)
    assert check is not None
    return check
