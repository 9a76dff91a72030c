"""Images as the model takes them, and what config.json says of the tower that looks at them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shard_plans.errors import RuntimeFault
from shard_plans.families.model import Model

TOWERS = ("moonvit", "moonvit3d", "qwen3_vl", "clip")
"""Values of the table's word `tower`; those without a block here take no image, and run with text alone."""
SIDE = 512
"""Patches along a side of an image at most: there the published code's table of angles ends."""
SPOKEN: Mapping[str, tuple[Any, ...]] = {
    "norm_type": ("rmsnorm",), "mlp_type": ("mlp2",), "activation_func": ("gelu_pytorch_tanh",),
    "attn_bias": (False,), "linear_bias": (False,), "patch_embed_proj_bias": (False,),
    "pos_emb_type": ("divided_fixed",), "pos_emb_interpolation_mode": ("bilinear",), "merge_type": ("sd2_tpool",),
    "mm_projector_type": ("patchmergerv2",), "projector_hidden_act": ("gelu",),
    "video_attn_type": ("spatial_temporal",),
}  # fmt: skip
"""Keys of vision_config that may be absent, but if present must hold what these blocks do."""


@dataclass(frozen=True, slots=True, eq=False)
class Images:
    """The images of one prompt, cut into patches."""

    pixels: Tensor
    """[patches, 3, patch, patch] float32: image after image, frame after frame, row after row."""
    grids: tuple[tuple[int, int, int], ...]
    """Frames, rows and columns of patches of each image."""


@dataclass(frozen=True, slots=True)
class Tower:
    """What the sizes of the family table don't say of the vision tower."""

    heads: int
    frames: int
    """Frames of one image at most."""
    merge: tuple[int, int]
    """Rows and columns of patches that become one token."""
    eps: float
    """Of the projector's norm; the tower's own norms take none."""
    placeholder: int
    """The token id whose rows of the embedding the image's tokens replace."""


def read_tower(model: Model) -> Tower:
    """The tower that config.json describes; RuntimeFault where it isn't the MoonViT3d that these blocks compute."""
    if model.words.get("tower") is None:
        raise RuntimeFault(f"the model {model.family} has no vision tower, so it can't look at images; give ids alone")
    if model.words["tower"] != "moonvit3d":
        raise RuntimeFault(f"no block for tower: {model.words['tower']}; the runtime has moonvit3d; give ids alone")
    config = model.config["vision_config"]
    for key, spoken in SPOKEN.items():
        if config.get(key) is not None and config[key] not in spoken:
            raise RuntimeFault(
                f"config.json: vision_config.{key} is {config[key]!r}, the runtime's tower has "
                f"{', '.join(map(repr, spoken))}; run without an image"
            )
    merge = config.get("merge_kernel_size")
    if not isinstance(merge, list) or len(merge) != 2 or not all(_whole(size) for size in merge):
        raise RuntimeFault(f"config.json: vision_config.merge_kernel_size is {merge!r}, two whole numbers are wanted")
    numbers = {}
    for key in ("vt_num_attention_heads", "init_pos_emb_time"):
        if not _whole(config.get(key)):
            raise RuntimeFault(f"config.json: vision_config.{key} is {config.get(key)!r}, a whole number is wanted")
        numbers[key] = int(config[key])
    heads, width = numbers["vt_num_attention_heads"], model.sizes["vt_qkv"]
    if width % (4 * heads):
        raise RuntimeFault(
            f"config.json: qkv_hidden_size {width} gives {heads} heads a width of {width / heads:g}; "
            "2-D RoPE turns four dimensions at a time"
        )
    eps = config.get("projector_ln_eps")
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or eps <= 0:
        raise RuntimeFault(f"config.json: vision_config.projector_ln_eps is {eps!r}, a number above 0 is wanted")
    placeholder = placeholder_id(model)
    if placeholder is None or not 0 <= placeholder < model.sizes["vocab"]:
        raise RuntimeFault(
            f"config.json: media_placeholder_token_id is {placeholder}, which is no id of the vocabulary of 0 to "
            f"{model.sizes['vocab'] - 1}"
        )
    return Tower(heads, numbers["init_pos_emb_time"], (merge[0], merge[1]), float(eps), placeholder)


def placeholder_id(model: Model) -> int | None:
    """The token id that stands for a piece of an image; None where there is no tower, or config.json has no such id."""
    found = model.config.get("media_placeholder_token_id") if model.words.get("tower") is not None else None
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def token_count(grids: tuple[tuple[int, int, int], ...], merge: tuple[int, int]) -> int:
    """Rows of the embedding that images of these grids fill: frames are averaged, so they count once."""
    return sum((rows // merge[0]) * (columns // merge[1]) for _, rows, columns in grids)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
