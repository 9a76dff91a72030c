"""What a model sees: images through its vision tower, in the places of their placeholders."""

from __future__ import annotations

from torch import Tensor

from runtime.blocks import clip, qwen_vision, vision
from runtime.blocks.beside import Beside
from runtime.blocks.context import RankContext
from runtime.blocks.dealt_images import look_in_parallel
from runtime.blocks.images import Images, read_tower
from runtime.blocks.probe import NOBODY, Looker
from runtime.blocks.weights import LayerWeights, Readings
from shard_plans.errors import RuntimeFault


def look(
    ctx: RankContext, weights: LayerWeights, images: Images, looker: Looker = NOBODY
) -> tuple[Tensor, Tensor | None]:
    """The tokens of `images`, in order, in the compute dtype, and what is added behind early layers.

    [tokens, hidden], and [layers, tokens, hidden] where the tower has such. Reads every vision.* weight.
    """
    ctx.pulse.enter("the vision tower")
    tower, read = read_tower(ctx.model), Readings(weights, ctx.pulse)

    def look_at(some: Images) -> tuple[Tensor, Tensor | None]:
        if tower.kind == "qwen3_vl":
            return qwen_vision.look(ctx, tower, read, some, looker)
        kind = clip if tower.kind == "clip" else vision
        return kind.look(ctx, tower, read, some, looker), None

    try:
        if ctx.deals_images and ctx.grid.tp > 1:
            seen = look_in_parallel(ctx, images, tower.merge, look_at)
        else:
            seen = look_at(images)
        read.refuse_unread()
    except RuntimeFault as fault:
        raise RuntimeFault(f"vision tower: {fault}") from fault
    return seen


def see(
    ctx: RankContext, weights: LayerWeights, images: Images, ids: Tensor, beside: Beside | None = None,
    looker: Looker = NOBODY,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Which of the token ids [T] stand for pieces of `images` [tokens], and what becomes of these [tokens, hidden].

    What is added behind early layers is left in `beside`, which may know the tokens already.
    """
    placeholder = read_tower(ctx.model).placeholder
    vectors, deep = look(ctx, weights, images, looker)
    tokens = None if beside is None else beside.tokens
    if tokens is None:
        tokens = (ids == placeholder).nonzero().flatten()
    if len(tokens) != len(vectors):
        raise RuntimeFault(
            f"{len(tokens)} token ids are the placeholder {placeholder}, the images make {len(vectors)} tokens"
        )
    if beside is not None:
        beside.deep = deep
    return tokens, vectors
