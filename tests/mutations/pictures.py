"""Prompts that hold images."""

from __future__ import annotations

import math
import random
from pathlib import Path

import torch
from safetensors.torch import save_file

from runtime.blocks.images import Grid3, read_tower
from shard_plans.families.model import Model

SIZES: tuple[Grid3, ...] = ((1, 4, 6), (1, 8, 2), (1, 10, 4), (1, 2, 14))
"""No two have the same patches or tokens, whatever their frames; smaller and larger than the tables of positions."""
TEXT, LAST_WORD = 5, 240
"""Most words before, between and behind the images; ids above are those of images and ends in some models."""


def pictures(dice: random.Random, model: Model, folder: Path) -> str:
    """Three images of random sizes and pixels among random words: the name of a file for --input-ids."""
    tower = read_tower(model)
    grids = dice.sample(SIZES, 3)
    if tower.frames > 1:
        grids[0] = (dice.randint(2, tower.frames), *grids[0][1:])
    if math.prod(grids[0]) == max(map(math.prod, grids)):  # dealt to ranks, images then don't lie in order by chance
        grids.append(grids.pop(0))

    def words() -> list[int]:
        return [dice.randrange(3, LAST_WORD) for _ in range(dice.randint(2, TEXT))]

    ids = words()
    for _, rows, columns in grids:
        ids += [tower.placeholder] * (rows // tower.merge[0] * (columns // tower.merge[1])) + words()
    random_ = torch.Generator().manual_seed(dice.randrange(1 << 30))
    patch = tower.patch or (3, model.sizes["patch"], model.sizes["patch"])
    pixels = torch.randn((sum(map(math.prod, grids)), *patch), generator=random_)
    file = folder / "pictures.safetensors"
    save_file({"input_ids": torch.tensor([ids]), "pixel_values": pixels, "grid_thw": torch.tensor(grids)}, file)
    return str(file)
