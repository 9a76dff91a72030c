"""Greedy generation over the same ranks: every rank learns each chosen token, then runs it against its cache."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import torch
from torch import Tensor

from runtime.blocks.piece import Caches
from runtime.passes import RankRun, forward_pass


def generate(
    run: RankRun, caches: Caches, scores: Tensor | None, seen: int, count: int, ends: AbstractSet[int], shift: int = 0
) -> list[int]:
    """Up to `count` more tokens after `seen` ones that filled `caches`; the same list on every rank.

    `scores` are the logits of the tokens so far on the last stage, None elsewhere. Stops behind a token of `ends`.
    `shift` is how far images before them move their places.
    """
    ctx, tokens = run.ctx, list[int]()
    while len(tokens) < count:
        best: Tensor | None = None
        if ctx.at.rank == run.output_rank and scores is not None:
            best = scores[-1].argmax()[None]
        chosen = ctx.comm.broadcast(best, run.output_rank, (1,), torch.int64)
        tokens.append(int(chosen))
        if tokens[-1] in ends or len(tokens) == count:
            break
        position = torch.tensor([seen + len(tokens) - 1], device=ctx.device)
        scores = forward_pass(run, chosen.to(ctx.device), position, caches, None, only_last=True, shift=shift)
    return tokens
