"""The reference itself against the transformers library: each layer fed with the library's own input, then the head."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.blocks import forward, stream
from runtime.checking.checks import LIMIT, Check, Measure, make_check
from runtime.checking.compare import NOISE, layer_error, relative, relative_margin
from runtime.checking.library import look, open_library
from runtime.checking.reference import Reference
from shard_plans.console import Advance

NAME = "transformers"


def judge_reference(
    own: Reference, texts: Sequence[Tensor], logits: Tensor | None, advance: Advance | None = None
) -> Check:
    """Compare the reference of the checkpoint's `own` weights with the library's model, over the texts (ids [tokens]).

    Tokens that a router's near-tie may have sent elsewhere are left out of their layer. `logits` are those that the
    ranks computed: how far they are from the library's is told, and not judged, since a near-tie may part them.
    RuntimeFault where the library can't do it (runtime/checking/library.py).
    """
    ctx, layers = own.context, own.context.model.forward_layers
    seen = look(open_library(own.binding), texts, len(layers))
    start = own.begin_all(texts)
    found, ties = [Measure(NAME, _relative(start, seen.starts[0].to(start.dtype)), "embedding")], 0
    with torch.no_grad():
        for number, layer in enumerate(layers):
            x, theirs = (part.to(ctx.device, start.dtype) for part in (seen.starts[number], seen.outs[number]))
            out, routing = forward.run_pieces(ctx, layer, own.weights(layer.index), x, own.pieces)
            kept = torch.ones(len(x), dtype=torch.bool)
            if routing is not None:
                kept = relative_margin(routing) > NOISE[torch.float32]
                ties += int((~kept).sum())
            if bool(kept.any()):
                base = stream.carry(ctx.model, layer, x)
                error, row = _error(base, out, theirs, kept)
                found.append(Measure(NAME, error, f"layer {layer.index}, row {row}"))
            if advance is not None:
                advance(number + 1, len(layers))
        ours = forward.logits(ctx, own.outside("last"), seen.outs[-1].to(ctx.device, start.dtype))
    found.append(Measure(NAME, _relative(ours, seen.logits), "logits"))
    note = "relative error of what a layer of the reference adds to a token, fed with the input that transformers has"
    if ties:
        note += f"; {ties} near-ties of routers left out"
    if logits is not None:
        note += f"; end to end the ranks' logits differ by {relative(logits, seen.logits):.1e}"
    check = make_check(NAME, found, LIMIT, note)
    assert check is not None
    return check


def _error(base: Tensor, ours: Tensor, theirs: Tensor, kept: Tensor) -> tuple[float, int]:
    """Of the kept rows: the worst error, and its row."""
    if ours.shape != theirs.shape:
        return math.inf, 0
    rows = kept.nonzero().flatten()
    error, row = layer_error(base.cpu()[rows], ours.cpu()[rows], theirs.cpu()[rows])
    return error, int(rows[row])


def _relative(ours: Tensor, theirs: Tensor) -> float:
    return relative(ours, theirs) if ours.shape == theirs.shape else math.inf
