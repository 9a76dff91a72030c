"""What comes into a stage, alone: the embedding of the ids, and the reference's own stream as it is handed over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from runtime.blocks.beside import Beside
from runtime.blocks.piece import Piece
from runtime.checking.compare import cosine, layer_error
from runtime.hand_over import hand_over, picks_wanted
from runtime.passes import RankRun


def handed_over(
    run: RankRun, stage: int, x: Tensor, pieces: Sequence[Piece]
) -> tuple[Tensor, Tensor | None] | None:  # fmt: skip
    """The stream x [tokens, .., hidden] as it comes to `stage` from the one before, and features of images.

    Every rank calls it; None on other stages. Of an indexer's picks only the shape is sent.
    """
    ctx, sent_along = run.ctx, []
    picks = picks_wanted(ctx.model, run.stages, stage)
    for piece in pieces:
        tokens = len(piece.positions)
        picked = torch.zeros((tokens, min(picks, tokens)), dtype=torch.int64, device=x.device) if picks else None
        deep = piece.beside.deep if ctx.at.stage == stage - 1 else None
        deep = None if deep is None else deep.to(ctx.compute)
        sent_along.append(replace(piece, beside=replace(piece.beside, picked=picked, deep=deep)))
    sent = x.to(ctx.compute) if ctx.at.stage == stage - 1 else None
    came = hand_over(ctx, run.stages, stage - 1, sent, sent_along)
    return None if came is None else (came, sent_along[0].beside.deep)


def stream_error(x: Tensor, reference: Tensor, beside: Beside, exact: bool) -> tuple[float, int] | None:
    """Worst relative error of a token that is a word (else the cosine of all), and the token; None without words."""
    words = torch.ones(len(x), dtype=torch.bool, device=x.device)
    if beside.tokens is not None:
        words[beside.tokens] = False
    if x.shape != reference.shape or not bool(words.any()):
        return None
    ours, theirs = x[words], reference[words]
    if not exact:
        return cosine(ours, theirs), 0
    error, row = layer_error(torch.zeros_like(theirs), ours, theirs)
    return error, int(words.nonzero()[row])
