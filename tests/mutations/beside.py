"""Bugs of images outside of the tower: dealt to ranks, put among words, placed, added behind early layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from runtime import answers, passes, session
from runtime.blocks import dealt_images, forward, gqa, rope, towers
from runtime.blocks.beside import Beside
from runtime.blocks.images import Images, read_tower
from runtime.blocks.piece import Piece
from runtime.blocks.places import whole_pieces
from runtime.blocks.rope import rope_settings
from runtime.checking import edges
from runtime.comm.virtual_comm import VirtualComm
from runtime.hand_over import hand_over
from tests.mutations.bug import ANSWER, SEEN, Bug, Site
from tests.mutations.code import replace_in_layer
from tests.mutations.looking import of, replace_in_tower

TOKENS, DEEP, PLACES = "the images' tokens", "deep features", "places of tokens"


def dealt(name: str, owner: Any, attribute: str, wrong: Any) -> Bug:
    """A bug of images that are dealt to the tp ranks."""

    def inject(site: Site) -> None:
        replace_in_tower(site.patch, owner, attribute, wrong)

    return Bug(name, SEEN, of(), inject, images=True, dealt=True, names=lambda site: f"{TOKENS}|{DEEP}")


def as_they_come(right: Callable[..., Tensor], dealt_: Any, counts: Sequence[int], device: Any) -> Tensor:
    """Rank after rank."""
    return torch.arange(sum(counts), device=device)


def one_patch_off(right: Callable[..., Images], images: Images, numbers: Sequence[int]) -> Images:
    """Each image is cut one patch behind its beginning."""
    return right(Images(images.pixels.roll(-1, 0), images.grids), numbers)


def reversed_parts(right: Callable[..., list[Tensor]], self: VirtualComm, x: Tensor, group: Any) -> list[Tensor]:
    """Ranks' parts in the other order, one behind the other."""
    parts = right(self, x, group)
    return list(torch.split(torch.cat(parts[::-1]), [len(part) for part in parts]))


def embedded(name: str, change: Callable[..., tuple[Tensor, Tensor] | None]) -> Bug:
    """What becomes of the images is put elsewhere among the words; `change` takes tokens, vectors, ids."""

    def inject(site: Site) -> None:
        right = forward.embed

        def embed(ctx: Any, weights: Any, ids: Tensor, images: Any = None) -> Tensor:
            wrong = images if images is None or ctx.grid.world == 1 else change(images[0], images[1], ids)
            return right(ctx, weights, ids, wrong)

        site.patch.setattr(forward, "embed", embed)

    return Bug(name, SEEN, of(), inject, images=True, names=lambda site: TOKENS)


def runs(tokens: Tensor) -> list[int]:
    """How many tokens each image has."""
    ends = ((tokens[1:] - tokens[:-1]) != 1).nonzero().flatten().tolist()
    return [stop - start for start, stop in pairwise([0, *(end + 1 for end in ends), len(tokens)])]


def other_images(tokens: Tensor, vectors: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The last image first."""
    return tokens, vectors.roll(runs(tokens)[-1], 0)


def placed(name: str, change: Callable[[Any, Beside], Beside]) -> Bug:
    """Ranks take the tokens for others; `change` takes the model."""

    def inject(site: Site) -> None:
        right = whole_pieces

        def whole(model: Any, texts: Any, images: Any = None) -> list[Piece]:
            found = right(model, texts, images)
            return [replace(found[0], beside=change(model, found[0].beside)), *found[1:]]

        site.patch.setattr(session, "whole_pieces", whole)

    return Bug(name, SEEN, mrope, inject, images=True, names=lambda site: PLACES)


def mrope(site: Site) -> bool:
    """Tokens of images turn by row and column."""
    return any(layer.words.get("rope") == "mrope_interleaved" for layer in site.model.layers)


def turned_layer(site: Site) -> bool:
    """So in this layer."""
    return bool(site.word("rope") == "mrope_interleaved" and site.word("attn") == "gqa")


def exchanged(model: Any, beside: Beside) -> Beside:
    """Rows for columns."""
    assert beside.places is not None
    return replace(beside, places=beside.places[[0, 2, 1]])


def as_words(model: Any, beside: Beside) -> Beside:
    """Images count as words do."""
    assert beside.places is not None
    return replace(beside, places=torch.arange(beside.places.shape[1]).expand(3, -1).contiguous())


def unmerged(model: Any, beside: Beside) -> Beside:
    """Rows and columns of an image count patches."""
    assert beside.places is not None and beside.tokens is not None
    places = beside.places.clone()
    places[1:, beside.tokens] *= read_tower(model).merge[0]
    return replace(beside, places=places)


def in_sections(right: Callable[..., Tensor], text: Any, count: int) -> Tensor:
    """Frames first, then rows, then columns."""
    return torch.repeat_interleave(torch.arange(3), torch.tensor(rope_settings(text)["mrope_section"]))


def columns_first(right: Callable[..., Tensor], text: Any, count: int) -> Tensor:
    """Frame, column, row."""
    axis = right(text, count)
    return torch.tensor([0, 2, 1])[axis]


def no_places(right: Callable[..., Any], *given: Any) -> Any:
    """All three are the token's position."""
    return right(*given[:5])


def turned(name: str, owner: Any, attribute: str, wrong: Any) -> Bug:
    """A bug of RoPE by places in one layer."""

    def inject(site: Site) -> None:
        replace_in_layer(site.patch, site.layer.index, owner, attribute, wrong)

    return Bug(name, "attn", turned_layer, inject, images=True)


def adds(site: Site) -> bool:
    """The layer adds features of images."""
    return bool(site.layer.index < site.model.sizes.get("deepstack", 0))


def added(name: str, wrong: Any) -> Bug:
    """A bug of what one layer adds of images."""

    def inject(site: Site) -> None:
        replace_in_layer(site.patch, site.layer.index, forward, "_deep", wrong)

    return Bug(name, "deep", adds, inject, images=True)


def nothing_added(right: Any, *given: Any) -> None:
    """Nothing."""


def next_ones(right: Callable[..., Tensor | None], layer: int, x: Tensor, pieces: Sequence[Piece]) -> Tensor | None:
    """Those of the layer behind it, or none."""
    return right(layer + 1, x, pieces)


def one_token_on(right: Callable[..., Tensor], *given: Any) -> Tensor:
    """To the token behind."""
    return right(*given).roll(1, 0)


def twice(right: Callable[..., Tensor], *given: Any) -> Tensor:
    """Added twice."""
    return 2 * right(*given)


def later_stage(site: Site) -> bool:
    """A stage behind the first that adds features."""
    return site.stage > 0 and site.opened.plan.stages[site.stage][0] < site.model.sizes.get("deepstack", 0)


def not_handed(site: Site) -> None:
    """Features of the other layer come to the stage."""

    def wrong(ctx: Any, stages: Any, stage: int, x: Any, pieces: Any) -> Any:
        came = hand_over(ctx, stages, stage, x, pieces)
        if came is not None and stage + 1 == site.stage:
            for piece in pieces:
                piece.beside.deep = piece.beside.deep.flip(0)
        return came

    for module in (passes, edges):
        site.patch.setattr(module, "hand_over", wrong)


def dropped(site: Site) -> None:
    """Features are lost behind the tower."""
    right = towers.see

    def see(ctx: Any, weights: Any, images: Any, ids: Any, beside: Beside, *rest: Any) -> Any:
        seen = right(ctx, weights, images, ids, beside, *rest)
        if ctx.grid.world > 1:
            beside.deep = None if beside.deep is None else beside.deep.flip(1)
        return seen

    site.patch.setattr(towers, "see", see)


BESIDE = (
    dealt("dealt images rank after rank", dealt_images, "_order", as_they_come),
    dealt("dealt images cut one patch off", dealt_images, "take", one_patch_off),
    dealt("dealt images in the other order", VirtualComm, "all_gather", reversed_parts),
    embedded("images one token on", lambda tokens, vectors, ids: ((tokens + 1) % len(ids), vectors)),
    embedded("images in each other's places", other_images),
    embedded("an image's tokens backwards", lambda tokens, vectors, ids: (tokens, vectors.flip(0))),
    embedded("placeholders left in place", lambda tokens, vectors, ids: None),
    placed("places' rows and columns exchanged", exchanged),
    placed("images placed as words", as_words),
    placed("places count patches", unmerged),
    turned("mrope section after section", rope, "axes", in_sections),
    turned("mrope columns before rows", rope, "axes", columns_first),
    turned("a layer without places", gqa, "turner", no_places),
    added("deep features not added", nothing_added),
    added("deep features of the next layer", next_ones),
    added("deep features one token on", one_token_on),
    added("deep features twice", twice),
    Bug("deep features handed over in the other order", SEEN, later_stage, not_handed, images=True,
        names=lambda site: f"deep features handed to stage {site.stage}"),
    Bug("deep features backwards", SEEN, lambda s: of()(s) and s.model.sizes.get("deepstack", 0) > 0, dropped,
        images=True, names=lambda site: "deep features"),
    Bug("answers placed as if without images", ANSWER, mrope,
        lambda site: site.patch.setattr(answers, "shift", lambda beside: 0), images=True),
)  # fmt: skip
