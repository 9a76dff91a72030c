"""Both ends of the model: the vocabulary-parallel embedding and head."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from runtime.blocks.context import RankContext
from runtime.blocks.norms import model_norm
from runtime.blocks.weights import LayerWeights, Stored, dense, take
from shard_plans.errors import RuntimeFault

HEAD_ROWS = 16384
"""Rows of the head that are converted to the compute dtype at a time."""


def embed(ctx: RankContext, weights: LayerWeights, ids: Tensor) -> Tensor:
    """Embeddings of the token ids [T]: [T, hidden] in the compute dtype, the same on all tp ranks.

    Reads `embed` [local rows, hidden]; rank r holds rows [r * local rows, (r + 1) * local rows).
    """
    vocab = ctx.size("vocab")
    if ids.dim() != 1 or ids.is_floating_point():
        raise RuntimeFault(f"token ids must be whole numbers [tokens], found {list(ids.shape)} {ids.dtype}")
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        raise RuntimeFault(
            f"token ids run from {int(ids.min())} to {int(ids.max())}, the vocabulary is 0 to {vocab - 1}"
        )
    table = take(weights, "embed")
    rows = _check_rows(ctx, "embed", table)
    local = ids - ctx.at.tp * rows
    here = (local >= 0) & (local < rows)
    values = table.values if table.format is None else dense(table, ctx.compute)
    picked = values[local.clamp(0, rows - 1)].to(ctx.compute)
    picked = picked.masked_fill(~here[:, None], 0)  # not a product: an inf that no id asked for must not spread
    return ctx.reduce_tp(ctx.pulse.saw("embed", picked))


def logits(ctx: RankContext, weights: LayerWeights, x: Tensor) -> Tensor:
    """Final norm and head: x [T, hidden] -> [T, vocab] in the compute dtype, padding rows cut, on all tp ranks.

    Reads `norm` and `head`; a tied model without `head` reads `embed`.
    """
    x = model_norm(ctx, weights, "norm", x)
    table = take(weights, "embed" if ctx.model.tied and "head" not in weights else "head")
    rows = _check_rows(ctx, "head", table)
    if table.format is None:
        slabs = (table.values[start : start + HEAD_ROWS] for start in range(0, rows, HEAD_ROWS))
        local = torch.cat([functional.linear(x, slab.to(ctx.compute)) for slab in slabs], dim=-1)
    else:
        local = functional.linear(x, dense(table, ctx.compute))
    ctx.pulse.saw("head", local)
    if ctx.grid.tp > 1:
        local = torch.cat(ctx.comm.all_gather(local, ctx.grid.tp_group(ctx.at)), dim=-1)
    return local[:, : ctx.size("vocab")]


def _check_rows(ctx: RankContext, role: str, table: Stored) -> int:
    rows, vocab = table.values.shape[0], ctx.size("vocab")
    if rows * ctx.grid.tp < vocab:
        raise RuntimeFault(f"{role} has {rows} rows on each of {ctx.grid.tp} ranks, the vocabulary has {vocab}")
    return rows
