"""The forward pass of one rank, a step at a time: embed, run each layer, logits.

The same code runs sharded and unsharded: with one rank's shard under any Comm, or with whole weights under NoComm.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
from runtime.blocks.router import Routing
from runtime.blocks.weights import LayerWeights, Readings
from runtime.blocks.words import check_layer, check_model
from shard_plans.errors import RuntimeFault
from shard_plans.families.model import Layer

__all__ = [
    "Beside", "ExpertSlots", "LayerCache", "RankContext", "Routing", "check_model", "embed", "logits", "named",
    "run_attention", "run_ffn", "run_layer", "single_rank",
]  # fmt: skip

ATTENTION = {"gqa": gqa, "mla": mla, "kda": kda, "gdn": gdn, "compressed": compressed}
"""The word `attn` -> its block."""


def embed(ctx: RankContext, weights: LayerWeights, ids: Tensor, images: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Embeddings of token ids [T]: the stream into the first layer, in the compute dtype. First stage; reads `embed`.

    `images`: tokens [n] whose embeddings give way to vectors [n, hidden], which something else made.
    """
    x = vocabulary.embed(ctx, weights, ids)
    if images is not None:
        tokens, vectors = images
        x = x.index_copy(0, tokens, vectors.to(x.dtype))
    return stream.begin(ctx.model, x)


def run_layer(
    ctx: RankContext, layer: Layer, weights: LayerWeights, x: Tensor, cache: LayerCache | None, positions: Tensor,
    beside: Beside | None = None,
) -> tuple[Tensor, Routing | None]:  # fmt: skip
    """One transformer layer: the stream x at `positions` [T] -> (the stream, where the tokens went if it is MoE).

    x is [T, hidden], or what runtime/blocks/stream.py says: the whole sequence of this dp replica, equal on its tp
    ranks. With a cache, tokens seen before are attended to and the new ones are kept. `beside` is what else is known of
    the tokens; some blocks need it. Raises RuntimeFault for a block that the runtime lacks, a missing weight, or one
    that no block reads.
    """
    read, beside = Readings(weights), beside or Beside()
    x = run_attention(ctx, layer, read, x, cache, positions, beside)
    x, routing = run_ffn(ctx, layer, read, x, beside)
    with named(layer):
        read.refuse_unread()
    return x, routing


def run_attention(
    ctx: RankContext, layer: Layer, weights: LayerWeights, x: Tensor, cache: LayerCache | None, positions: Tensor,
    beside: Beside,
) -> Tensor:  # fmt: skip
    """The layer's first half: the stream x with attention's output added. As run_layer."""
    check_layer(ctx.model, layer)
    with named(layer):
        h, add = stream.enter(ctx, layer, weights, "attn", x)
        h = model_norm(ctx, weights, "attn.norm", h)
        return add(ATTENTION[layer.words["attn"]](ctx, layer, weights, h, cache, positions, beside))


def run_ffn(
    ctx: RankContext, layer: Layer, weights: LayerWeights, x: Tensor, beside: Beside
) -> tuple[Tensor, Routing | None]:
    """The layer's second half: the stream x behind attention, with the output of the experts or the MLP added.

    What images add to early layers counts with it. As run_layer.
    """
    check_layer(ctx.model, layer)
    with named(layer):
        h, add = stream.enter(ctx, layer, weights, "ffn", x)
        h = model_norm(ctx, weights, "ffn.norm", h)
        routing: Routing | None = None
        if layer.words["ffn"] == "moe":
            y, routing = moe(ctx, layer, weights, h, beside.ids)
        else:
            y = swiglu(ctx, layer.words, weights, "mlp", "ffn", h)
    x = add(y)
    if beside.deep is not None and beside.tokens is not None and layer.index < len(beside.deep):
        x = x.index_add(0, beside.tokens, beside.deep[layer.index].to(x.dtype))
    return x, routing


def logits(ctx: RankContext, weights: LayerWeights, x: Tensor) -> Tensor:
    """Final norm and head of the stream x: [T, vocab] in the compute dtype. Last stage.

    Reads `norm`, `head` (tied: or `embed`), and out.res_norm and out.res_proj where the stream is attn_res.
    """
    return vocabulary.logits(ctx, weights, stream.seen(ctx, weights, "out", x))


@contextmanager
def named(layer: Layer) -> Iterator[None]:
    """Faults within name the layer."""
    try:
        yield
    except RuntimeFault as fault:
        raise RuntimeFault(f"layer {layer.index}: {fault}") from fault
