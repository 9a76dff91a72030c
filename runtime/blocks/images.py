"""Images as the model takes them, and what config.json says of the tower that looks at them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shard_plans.errors import RuntimeFault
from shard_plans.families.model import Model

Grid3 = tuple[int, int, int]
"""Frames, rows and columns of patches of an image."""
SIDE = 512
"""Patches along a side of an image at most: there the published code's table of angles ends."""
SPOKEN: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "moonvit3d": {
        "norm_type": ("rmsnorm",), "mlp_type": ("mlp2",), "activation_func": ("gelu_pytorch_tanh",),
        "attn_bias": (False,), "linear_bias": (False,), "patch_embed_proj_bias": (False,),
        "pos_emb_type": ("divided_fixed",), "pos_emb_interpolation_mode": ("bilinear",), "merge_type": ("sd2_tpool",),
        "mm_projector_type": ("patchmergerv2",), "projector_hidden_act": ("gelu",),
        "video_attn_type": ("spatial_temporal",),
    },
    "moonvit": {
        "hidden_act": ("gelu_pytorch_tanh",), "pos_emb_type": ("divided_fixed",), "merge_type": ("sd2_tpool",),
        "mm_projector_type": ("patchmerger",), "projector_hidden_act": ("gelu",),
        "video_attn_type": ("spatial_temporal",),
    },
    "qwen3_vl": {"hidden_act": ("gelu_pytorch_tanh",), "in_channels": (3,)},
    "clip": {"hidden_act": ("gelu",), "num_channels": (3,)},
}  # fmt: skip
"""Tower -> keys of vision_config that may be absent, but if present must hold what its block does."""
PLACEHOLDERS = ("media_placeholder_token_id", "image_token_id", "image_token_index")
"""How config.json calls the id that stands for a piece of an image."""
QWEN_EPS = 1e-6
"""Of all norms of Qwen3-VL's tower, whatever config.json says."""


@dataclass(frozen=True, slots=True, eq=False)
class Images:
    """The images of one prompt, cut into patches."""

    pixels: Tensor
    """[patches, ..] float32, one patch as the tower takes it: image after image, frame after frame, and in a frame row
    after row (qwen3_vl: square of patches that become one token after square)."""
    grids: tuple[Grid3, ...]
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
    """Of the projector's norm; of all norms but MoonViT's own."""
    placeholder: int
    """The token id whose rows of the embedding the image's tokens replace."""
    kind: str = "moonvit3d"
    """The table's word `tower`."""
    patch: tuple[int, ...] = ()
    """Shape of the numbers of one patch."""


def read_tower(model: Model) -> Tower:
    """The tower that config.json describes; RuntimeFault where it isn't one that these blocks compute."""
    kind = model.words.get("tower")
    if kind is None:
        raise RuntimeFault(f"the model {model.family} has no vision tower, so it can't look at images; give ids alone")
    config = model.config["vision_config"]
    for key, spoken in SPOKEN[kind].items():
        if config.get(key) is not None and config[key] not in spoken:
            raise RuntimeFault(
                f"config.json: vision_config.{key} is {config[key]!r}, the runtime's tower has "
                f"{', '.join(map(repr, spoken))}; run without an image"
            )
    side = model.sizes["patch"]
    patch: tuple[int, ...] = (3, side, side)
    if kind in ("qwen3_vl", "clip"):
        heads, edge = _number(config, "num_heads", "num_attention_heads"), _number(config, "spatial_merge_size")
        merge, frames, patch = [edge, edge], 1, (3 * model.sizes["frames"] * side * side,)
        eps = QWEN_EPS if kind == "qwen3_vl" else _eps(config.get("layer_norm_eps"), "layer_norm_eps")
    else:
        merge = config.get("merge_kernel_size")
        if not isinstance(merge, list) or len(merge) != 2 or not all(_whole(size) for size in merge):
            raise RuntimeFault(
                f"config.json: vision_config.merge_kernel_size is {merge!r}, two whole numbers are wanted"
            )
        heads = _number(config, "vt_num_attention_heads", "num_attention_heads")
        frames, eps = _number(config, "init_pos_emb_time", "pos_emb_time"), _projector_eps(model)
    width = model.sizes.get("vt_qkv", model.sizes["vt"])
    if width % (4 * heads):
        raise RuntimeFault(
            f"config.json: qkv_hidden_size {width} gives {heads} heads a width of {width / heads:g}; "
            "2-D RoPE turns four dimensions at a time"
        )
    placeholder = placeholder_id(model)
    if placeholder is None or not 0 <= placeholder < model.sizes["vocab"]:
        raise RuntimeFault(
            f"config.json: media_placeholder_token_id is {placeholder}, which is no id of the vocabulary of 0 to "
            f"{model.sizes['vocab'] - 1}"
        )
    return Tower(heads, frames, (merge[0], merge[1]), eps, placeholder, kind, patch)


def placeholder_id(model: Model) -> int | None:
    """The token id that stands for a piece of an image; None where there is no tower, or config.json has no such id."""
    if model.words.get("tower") is None:
        return None
    found = next((model.config[key] for key in PLACEHOLDERS if model.config.get(key) is not None), None)
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def _projector_eps(model: Model) -> float:
    eps = model.config["vision_config"].get("projector_ln_eps", model.config.get("projection_layer_norm_eps"))
    return _eps(eps, "projector_ln_eps")


def _eps(eps: object, key: str) -> float:
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or eps <= 0:
        raise RuntimeFault(f"config.json: vision_config.{key} is {eps!r}, a number above 0 is wanted")
    return float(eps)


def _number(config: Mapping[str, Any], *keys: str) -> int:
    """The first of the keys that vision_config has, a whole number."""
    key = next((key for key in keys if key in config), keys[0])
    if not _whole(config.get(key)):
        raise RuntimeFault(f"config.json: vision_config.{key} is {config.get(key)!r}, a whole number is wanted")
    return int(config[key])


def token_count(grids: tuple[Grid3, ...], merge: tuple[int, int]) -> int:
    """Rows of the embedding that images of these grids fill: frames are averaged, so they count once."""
    return sum((rows // merge[0]) * (columns // merge[1]) for _, rows, columns in grids)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
