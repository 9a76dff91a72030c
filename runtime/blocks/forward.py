"""The forward pass of one rank, a step at a time: embed, run each layer, logits.

The same code runs sharded and unsharded: with one rank's shard under any Comm, or with whole weights under NoComm.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.blocks import stream, vocabulary
from runtime.blocks.beside import Beside
from runtime.blocks.cache import LayerCache
from runtime.blocks.compressed import compressed
from runtime.blocks.context import ExpertSlots, RankContext, single_rank
from runtime.blocks.ffn import swiglu
from runtime.blocks.gdn import gdn
from runtime.blocks.gqa import gqa
from runtime.blocks.kda import kda
from runtime.blocks.mla import mla
from runtime.blocks.moe import moe
from runtime.blocks.norms import model_norm
from runtime.blocks.piece import Piece, ids_of
from runtime.blocks.probe import NOBODY, Probe
from runtime.blocks.router import Routing
from runtime.blocks.weights import LayerWeights, Readings
from runtime.blocks.words import check_layer, check_model
from shard_plans.errors import RuntimeFault
from shard_plans.families.model import Layer

__all__ = [
    "Beside", "ExpertSlots", "LayerCache", "RankContext", "Routing", "check_model", "embed", "logits", "run_layer",
    "single_rank",
]  # fmt: skip

ATTENTION = {"gqa": gqa, "mla": mla, "kda": kda, "gdn": gdn, "compressed": compressed}
"""The word `attn` -> its block."""


def embed(ctx: RankContext, weights: LayerWeights, ids: Tensor, images: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Embeddings of token ids [T]: the stream into the first layer, in the compute dtype. First stage; reads `embed`.

    `images`: tokens [n] whose embeddings give way to vectors [n, hidden], which something else made.
    """
    ctx.pulse.enter("the embedding")
    x = vocabulary.embed(ctx, weights, ids)
    if images is not None:
        tokens, vectors = images
        x = x.index_copy(0, tokens, vectors.to(x.dtype))
    return stream.begin(ctx.model, x)


def run_layer(
    ctx: RankContext, layer: Layer, weights: LayerWeights, x: Tensor, cache: LayerCache | None, positions: Tensor,
    beside: Beside | None = None, probe: Probe = NOBODY,
) -> tuple[Tensor, Routing | None]:  # fmt: skip
    """One transformer layer: the stream x at `positions` [T] -> (the stream, where the tokens went if it is MoE).

    x is [T, hidden], or what runtime/blocks/stream.py says: the whole sequence of this dp replica, equal on its tp
    ranks. With a cache, tokens seen before are attended to and the new ones are kept. `beside` is what else is known of
    the tokens; some blocks need it. Raises RuntimeFault for a block that the runtime lacks, a missing weight, or one
    that no block reads.
    """
    caches = None if cache is None else {layer.index: cache}
    return run_pieces(ctx, layer, weights, x, [Piece(positions, beside or Beside(), caches)], probe)


def run_pieces(
    ctx: RankContext, layer: Layer, weights: LayerWeights, x: Tensor, pieces: Sequence[Piece], probe: Probe = NOBODY
) -> tuple[Tensor, Routing | None]:
    """As run_layer, of several sequences at once: x has the rows of all `pieces`, one behind the other.

    Attention runs for each sequence apart; all else takes all rows together.
    """
    check_layer(ctx.model, layer)
    ctx.pulse.enter(f"layer {layer.index}")
    try:
        return _run_layer(ctx, layer, weights, x, pieces, probe)
    except RuntimeFault as fault:
        raise RuntimeFault(f"layer {layer.index}: {fault}") from fault


def logits(ctx: RankContext, weights: LayerWeights, x: Tensor) -> Tensor:
    """Final norm and head of the stream x: [T, vocab] in the compute dtype. Last stage.

    Reads `norm`, `head` (tied: or `embed`), and out.res_norm and out.res_proj where the stream is attn_res.
    """
    ctx.pulse.enter("the head")
    scores = vocabulary.logits(ctx, weights, stream.seen(ctx, weights, "out", x))
    ctx.pulse.settle()
    return scores


def _run_layer(
    ctx: RankContext, layer: Layer, weights: LayerWeights, x: Tensor, pieces: Sequence[Piece], probe: Probe
) -> tuple[Tensor, Routing | None]:
    read = Readings(weights, ctx.pulse)
    probe.saw("stream", x)
    h, add = stream.enter(ctx, layer, read, "attn", x)
    h = model_norm(ctx, read, "attn.norm", h)
    probe.saw("attn.norm", h)
    y = _attention(ctx, layer, read, h, pieces)
    probe.saw("attn", y)
    x = add(y)
    del y  # the other half needs the room
    h, add = stream.enter(ctx, layer, read, "ffn", x)
    h = model_norm(ctx, read, "ffn.norm", h)
    probe.saw("ffn.norm", h)
    routing: Routing | None = None
    if layer.words["ffn"] == "moe":
        y, routing = moe(ctx, layer, read, h, ids_of(pieces), probe)
    else:
        y = swiglu(ctx, layer.words, read, "mlp", "ffn", h)
    read.refuse_unread()
    probe.saw("ffn", y)
    x = add(y)
    deep = _deep(layer.index, x, pieces)
    if deep is not None:
        probe.saw("deep", deep)
        x = x + deep
    ctx.pulse.saw("the stream", x)
    ctx.pulse.settle()
    return x, routing


def _deep(layer: int, x: Tensor, pieces: Sequence[Piece]) -> Tensor | None:
    """What features of images add behind the layer, in the shape of x; None where nothing is added."""
    added, start = None, 0
    for piece in pieces:
        beside = piece.beside
        if beside.deep is not None and beside.tokens is not None and layer < len(beside.deep):
            added = torch.zeros_like(x) if added is None else added
            added = added.index_add(0, beside.tokens + start, beside.deep[layer].to(x.dtype))
        start += len(piece.positions)
    return added


def _attention(
    ctx: RankContext, layer: Layer, weights: LayerWeights, h: Tensor, pieces: Sequence[Piece]
) -> Tensor:  # fmt: skip
    block, index = ATTENTION[layer.words["attn"]], layer.index
    if len(pieces) == 1:  # no copy of h
        return block(ctx, layer, weights, h, pieces[0].cache(index), pieces[0].positions, pieces[0].beside)
    parts = torch.split(h, [len(piece.positions) for piece in pieces])
    return torch.cat([
        block(ctx, layer, weights, part, piece.cache(index), piece.positions, piece.beside)
        for part, piece in zip(parts, pieces, strict=True)
    ])  # fmt: skip
