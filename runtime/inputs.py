"""What to run: token ids, given, from a file, from a prompt, or a fixed list; and the images of an ids file."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.blocks.images import SIDE, Images, placeholder_id, read_tower, token_count
from runtime.text import Tokenizer
from shard_plans.errors import RuntimeFault
from shard_plans.families.model import Model

DEFAULT_TOKENS = 16
IDS_FILE = ".safetensors"
"""How the name of a file of ids ends."""
MOST_TOKENS = 1 << 24
"""Of the fixed list, whatever the model is made for."""
SEED = 20240817
"""Of the fixed list; the same ids for every run over one vocabulary."""


def default_ids(vocab: int, never: int | None = None, count: int = DEFAULT_TOKENS) -> list[int]:
    """A fixed list of `count` ids, without the id `never`; a longer list begins with the shorter ones."""
    chance = random.Random(SEED)
    drawn = (chance.randrange(vocab) for _ in range(2 * count))
    return [number for number in drawn if number != never][:count]


def choose_ids(
    prompt: str | None, given: str | None, tokenizer: Tokenizer | None, model: Model, count: int = DEFAULT_TOKENS
) -> list[int]:
    """The ids of the prompt, of the list `1,2,3`, of the file FILE.safetensors, or else the first `count` of a fixed
    list; RuntimeFault says what is wrong.
    """
    if prompt is not None and given is not None:
        raise RuntimeFault("--prompt contradicts --input-ids; give one of them")
    if prompt is not None and tokenizer is not None:
        return tokenizer.encode(prompt)
    if given is None:
        return default_ids(model.sizes["vocab"], placeholder_id(model), count)
    if given.endswith(IDS_FILE):
        return read_ids(Path(given))
    words = [word.strip() for word in given.split(",")]
    bad = next((word for word in words if not (word.isascii() and word.isdigit() and len(word) < 10)), None)
    if bad is not None:
        raise RuntimeFault(f"--input-ids: {bad!r} isn't a token id; write 1,2,3 or name a FILE.safetensors")
    return [int(word) for word in words]


def read_ids(path: Path) -> list[int]:
    """`input_ids`, int64 [1, tokens], from a safetensors file."""
    found, names = _read(path, ("input_ids",))
    if not found:
        raise RuntimeFault(f"{path} holds no tensor input_ids; it holds {', '.join(names) or 'nothing'}")
    ids = found["input_ids"]
    if ids.dtype != torch.int64 or ids.dim() != 2 or ids.shape[0] != 1:
        raise RuntimeFault(f"{path}: input_ids is {ids.dtype} {list(ids.shape)}, int64 [1, tokens] is wanted")
    return [int(number) for number in ids[0].tolist()]


def choose_images(given: str | None, model: Model) -> Images | None:
    """The images of the ids file: `pixel_values` float32 [patches, 3, patch, patch], `grid_thw` int64 [images, 3].

    None where the ids come without images. RuntimeFault where the tensors don't fit one another or the model.
    """
    if given is None or not given.endswith(IDS_FILE):
        return None
    path = Path(given)
    found, _ = _read(path, ("pixel_values", "grid_thw"))
    if not found:
        return None
    if len(found) == 1:
        here, lost = ("pixel_values", "grid_thw") if "pixel_values" in found else ("grid_thw", "pixel_values")
        raise RuntimeFault(f"{path} holds {here} but no {lost}; an image needs both")
    tower = read_tower(model)
    pixels, grid = found["pixel_values"], found["grid_thw"]
    if pixels.dtype != torch.float32 or pixels.shape[1:] != tower.patch:
        wanted = ", ".join(map(str, ("patches", *tower.patch)))
        raise RuntimeFault(f"{path}: pixel_values is {pixels.dtype} {list(pixels.shape)}, float32 [{wanted}] is wanted")
    if grid.dtype != torch.int64 or grid.dim() != 2 or grid.shape[1] != 3 or not len(grid):
        raise RuntimeFault(f"{path}: grid_thw is {grid.dtype} {list(grid.shape)}, int64 [images, 3] is wanted")
    grids = tuple((int(t), int(h), int(w)) for t, h, w in grid.tolist())
    for number, (frames, rows, columns) in enumerate(grids):
        where = f"{path}: image {number} has {frames} x {rows} x {columns} patches"
        if not 1 <= frames <= tower.frames:
            raise RuntimeFault(f"{where}; the model takes 1 to {tower.frames} frames")
        for length, part in zip((rows, columns), tower.merge, strict=True):
            if not part <= length <= SIDE or length % part:
                raise RuntimeFault(f"{where}; a side is {length}, and must be a multiple of {part} of at most {SIDE}")
    patches = sum(frames * rows * columns for frames, rows, columns in grids)
    if patches != len(pixels):
        raise RuntimeFault(f"{path}: pixel_values holds {len(pixels)} patches, grid_thw makes {patches}")
    if bad := int((~torch.isfinite(pixels)).sum()):
        raise RuntimeFault(f"{path}: {bad} of {pixels.numel()} pixel_values aren't finite numbers")
    return Images(pixels, grids)


def _read(path: Path, wanted: tuple[str, ...]) -> tuple[dict[str, Tensor], list[str]]:
    """Those of the `wanted` tensors that a safetensors file holds, and the names of all that it holds."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            names: list[Any] = list(file.keys())
            return {name: file.get_tensor(name) for name in wanted if name in names}, names
    except (OSError, SafetensorError) as error:
        raise RuntimeFault(f"the ids file {path} can't be read: {error}") from error


def check_images(ids: list[int], images: Images | None, model: Model) -> None:
    """Refuse ids whose placeholders aren't as many as the tokens that the images make."""
    if images is None:
        count = ids.count(found) if (found := placeholder_id(model)) is not None else 0
        if count:
            raise RuntimeFault(
                f"{count} token ids are the placeholder {found} of an image, and there are 0 images; give an ids file "
                "with pixel_values and grid_thw"
            )
        return
    tower = read_tower(model)
    count, tokens = ids.count(tower.placeholder), token_count(images.grids, tower.merge)
    if count != tokens:
        raise RuntimeFault(
            f"{count} token ids are the placeholder {tower.placeholder}, the {len(images.grids)} images make {tokens} "
            "tokens; each image needs rows / {} x columns / {} of them".format(*tower.merge)
        )


def check_ids(ids: list[int], new_tokens: int, model: Model) -> None:
    """Refuse no ids, ids outside the vocabulary, and more positions than the model was made for."""
    if not ids:
        raise RuntimeFault("there are no token ids to run; give at least one")
    vocab = model.sizes["vocab"]
    for place, number in enumerate(ids):
        if not 0 <= number < vocab:
            raise RuntimeFault(f"token id {number} at position {place} is outside the vocabulary of 0 to {vocab - 1}")
    check_length(len(ids), new_tokens, model)


def check_context(count: int, model: Model) -> None:
    """Refuse a fixed list that is longer than the model was made for, or than can be drawn, before it is drawn."""
    check_length(count, 0, model)
    if count > MOST_TOKENS:
        raise RuntimeFault(
            f"--context is {count}; at most {MOST_TOKENS} tokens are drawn; give fewer, or ids of your own"
        )


def check_length(tokens: int, new_tokens: int, model: Model) -> None:
    """Refuse more positions than the model was made for."""
    limit = model.text.get("max_position_embeddings")
    if isinstance(limit, int) and tokens + new_tokens > limit:
        raise RuntimeFault(
            f"{tokens} tokens and {new_tokens} new ones are more than the {limit} positions that config.json allows "
            "(max_position_embeddings); give fewer"
        )
