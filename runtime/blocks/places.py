"""Where tokens stand in text and in images: three positions a token, for RoPE that turns by frame, row and column."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.blocks.beside import Beside
from runtime.blocks.images import Images, read_tower
from runtime.blocks.piece import Piece
from shard_plans.errors import RuntimeFault
from shard_plans.families.model import Model


def beside_images(model: Model, ids: Tensor, images: Images | None, prompt: int | None = None) -> Beside:
    """What is known of the token ids [T] beside the stream, before the tower has looked.

    Images are among the first `prompt` ids (None: all); a placeholder that was generated behind them is a word.
    """
    if images is None:
        return Beside(ids)
    given = ids[:prompt]
    tokens = (given == read_tower(model).placeholder).nonzero().flatten()
    if not any(layer.words.get("rope") == "mrope_interleaved" for layer in model.layers):
        return Beside(ids, tokens=tokens)
    places = find_places(model, given, images)
    behind = torch.arange(len(ids) - len(given), device=ids.device) + places.max() + 1
    return Beside(ids, torch.cat([places, behind.expand(3, -1)], dim=1), tokens=tokens)


def whole_pieces(model: Model, texts: Sequence[Tensor], images: Images | None = None) -> list[Piece]:
    """Whole texts, ids [tokens] each, that no cache is kept of; `images` are those of the first."""
    return [
        Piece(torch.arange(len(ids), device=ids.device), beside_images(model, ids, None if number else images))
        for number, ids in enumerate(texts)
    ]


def find_places(model: Model, ids: Tensor, images: Images) -> Tensor:
    """Frame, row and column of every token [3, T].

    Text counts all three up. An image of merged rows x columns starts where the text before it ends; its tokens differ
    by row and column; the text behind it starts after its longer side (transformers' get_rope_index of Qwen3-VL).
    """
    tower, grids = read_tower(model), iter(images.grids)
    parts, at, token = [], 0, 0
    picture = (ids == tower.placeholder).tolist()
    while token < len(picture):
        if not picture[token]:
            parts.append(torch.full((3, 1), at, dtype=torch.int64))
            at, token = at + 1, token + 1
            continue
        image = next(grids, None)
        if image is None:
            raise RuntimeFault(f"token {token} stands for a piece of an image, and there is none left for it")
        frames, rows, columns = image
        rows, columns = rows // tower.merge[0], columns // tower.merge[1]
        axes = [torch.arange(length) for length in (frames, rows, columns)]
        parts.append(torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1) + at)
        at, token = at + max(rows, columns), token + frames * rows * columns
    return torch.cat(parts, dim=1).to(ids.device)


def shift(beside: Beside) -> int:
    """By how much the place of the next token differs from its position."""
    return 0 if beside.places is None else int(beside.places.max()) + 1 - beside.places.shape[1]
