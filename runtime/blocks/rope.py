"""Rotary position embedding: the config's two spellings, the scaling types, and the two pairings of dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shard_plans.errors import ConfigError, RuntimeFault

TYPES = ("default", "linear", "llama3", "yarn")
"""Values of rope_type (older spelling: type) that have a formula here."""

STYLES = ("half", "interleaved", "complex", "mrope_interleaved")
"""Values of the table's word `rope` that turn something."""


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """Frequencies of one rotary embedding, after scaling."""

    inverse_frequencies: Tensor
    """[width / 2], radians a token, in the dtype of the angles."""
    attention_factor: float
    """Multiplies cosine and sine (yarn; else 1)."""

    def turns(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine [T, width / 2] at `positions` [T], or for each frequency its own [T, width / 2].

        Computed in the angles' dtype, returned in `dtype`.
        """
        at = positions.to(self.inverse_frequencies.dtype)
        angles = (at[:, None] if at.dim() == 1 else at) * self.inverse_frequencies
        return (angles.cos() * self.attention_factor).to(dtype), (angles.sin() * self.attention_factor).to(dtype)


def rope_settings(text: Mapping[str, Any]) -> dict[str, Any]:
    """The config's rotary settings in one spelling: rope_type, rope_theta, and what the type needs.

    Reads `rope_scaling` {type or rope_type, ...} beside `rope_theta`, or `rope_parameters` {rope_type, rope_theta, ..};
    where both exist, rope_scaling wins, as in transformers.
    """
    given = text.get("rope_scaling") or text.get("rope_parameters") or {}
    nested = [key for key, value in given.items() if isinstance(value, Mapping)]
    if nested:
        raise RuntimeFault(f"no block for RoPE settings that differ by layer type ({', '.join(nested)})")
    settings = dict(given)
    settings["rope_type"] = given.get("rope_type") or given.get("type") or "default"
    if settings.get("rope_theta") is None:
        settings["rope_theta"] = text.get("rope_theta")
    if settings["rope_theta"] is None:
        raise ConfigError("config.json gives no rope_theta, neither by itself nor in rope_parameters")
    if settings["rope_type"] not in TYPES:
        raise RuntimeFault(f"no block for rope_type: {settings['rope_type']}; the runtime has {', '.join(TYPES)}")
    if settings["rope_type"] in ("llama3", "yarn"):
        longest = text.get("max_position_embeddings")
        first = text.get("original_max_position_embeddings", settings.get("original_max_position_embeddings", longest))
        settings["original_max_position_embeddings"] = first
        if settings["rope_type"] == "yarn" and settings.get("factor") is None and longest and first:
            settings["factor"] = longest / first
    return settings


def make_rope(text: Mapping[str, Any], width: int, compute: torch.dtype, device: torch.device) -> Rope:
    """The rotary embedding of `width` dimensions that the config describes.

    Angles are float64 where `compute` is, else float32, with transformers' formulas (modeling_rope_utils) step by step.
    """
    settings = rope_settings(text)
    wide = torch.float64 if compute == torch.float64 else torch.float32
    kind, base = settings["rope_type"], float(settings["rope_theta"])
    powers = base ** (torch.arange(0, width, 2, dtype=torch.int64).to(wide) / width)
    factor = 1.0
    if kind == "linear":
        inverse = 1.0 / powers / _number(settings, "factor")
    elif kind == "llama3":
        inverse = _llama3(settings, 1.0 / powers)
    elif kind == "yarn":
        inverse = _yarn(settings, powers, width, base)
        factor = _yarn_attention_factor(settings)
    else:
        inverse = 1.0 / powers
    return Rope(inverse.to(device), factor)


def turner(
    words: Mapping[str, Any], text: Mapping[str, Any], width: int, positions: Tensor, compute: torch.dtype,
    places: Tensor | None = None,
) -> Callable[[Tensor], Tensor]:  # fmt: skip
    """What turns queries and keys [T, heads, >= width] at `positions` [T]; nothing does where the table says none.

    With `mrope_interleaved`, `places` [3, T] are frame, row and column where these aren't all the position.
    """
    if words["rope"] == "none":
        return lambda x: x
    rope = make_rope(text, width, compute, positions.device)
    if places is None or words["rope"] != "mrope_interleaved":
        cos, sin = rope.turns(positions, compute)
    else:
        cos, sin = rope.turns(places[axes(text, width // 2).to(places.device)].T, compute)
    return partial(rotate, words["rope"], cos=cos, sin=sin)


def axes(text: Mapping[str, Any], count: int) -> Tensor:
    """Which of frame, row and column each of so many frequencies turns by [count]: t, h, w, t, h, w, ...

    `mrope_section` counts them; where rows and columns have had theirs, frames take the rest.
    """
    section = rope_settings(text).get("mrope_section")
    if not isinstance(section, list) or len(section) != 3 or sum(section) != count:
        raise ConfigError(f"config.json: mrope_section is {section!r}, three numbers that make {count} are wanted")
    axis = torch.arange(count) % 3
    return torch.where(torch.arange(count) < 3 * torch.tensor(section)[axis], axis, 0)


def rotate(style: str, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs of dimensions of x [T, heads, >= width] by the angles [T, width / 2]; further dimensions pass.

    `half` pairs dimension i with i + width / 2; `interleaved` pairs 2i with 2i + 1 and leaves all first members in
    front of all second ones, for queries and keys alike. `complex`, numbers whose real and imaginary parts lie side by
    side, are the same pairs; `mrope_interleaved` pairs as `half` does.
    """
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    if style in ("interleaved", "complex"):
        first, second = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    elif style in ("half", "mrope_interleaved"):
        first, second = x[..., :half], x[..., half : 2 * half]
    else:
        raise RuntimeFault(f"no block for rope: {style}; the runtime has {', '.join(STYLES)}")
    return torch.cat([first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :]], dim=-1)


def rotate_tail(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the last dimensions of x [T, heads, width], pairs side by side, by the angles [T, count]; pairs stay put."""
    count = 2 * cos.shape[-1]
    tail = x[..., x.shape[-1] - count :].reshape(*x.shape[:-1], count // 2, 2)
    first, second, cos, sin = tail[..., 0], tail[..., 1], cos[:, None], sin[:, None]
    turned = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
    return torch.cat([x[..., : x.shape[-1] - count], turned], dim=-1)


def of_kind(text: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The config with the rotary settings of layers of one kind, `main` or `compress`, as its only ones (DeepSeek-V4).

    `rope_parameters` has a section for each; or else `rope_theta` is main's, `compress_rope_theta` and `rope_scaling`
    are compress's, whose cosines and sines yarn doesn't scale.
    """
    given = text.get("rope_parameters") or {}
    found = given.get(kind)
    if not isinstance(found, Mapping):
        scaling = text.get("rope_scaling") if kind == "compress" else None
        found = {**(scaling or {}), "rope_theta": text.get("rope_theta" if kind == "main" else "compress_rope_theta")}
        if (found.get("rope_type") or found.get("type")) == "yarn":
            found.setdefault("attention_factor", 1.0)
    return {**text, "rope_scaling": None, "rope_parameters": found}


def softmax_scale(words: Mapping[str, Any], text: Mapping[str, Any], width: int) -> float:
    """width^-0.5, times yarn's mscale squared where the table says `softmax_scale: yarn_mscale2` (DeepSeek-V3)."""
    scale = float(width**-0.5)
    if words.get("softmax_scale") is None:
        return scale
    settings = rope_settings(text)
    all_dim = settings.get("mscale_all_dim")
    if settings["rope_type"] == "default" or not all_dim:
        return scale
    mscale = _mscale(_number(settings, "factor"), all_dim)
    return scale * mscale * mscale


def _llama3(settings: Mapping[str, Any], inverse: Tensor) -> Tensor:
    factor, length = _number(settings, "factor"), _number(settings, "original_max_position_embeddings")
    low, high = _number(settings, "low_freq_factor"), _number(settings, "high_freq_factor")
    wavelength = 2 * math.pi / inverse
    scaled = torch.where(wavelength > length / low, inverse / factor, inverse)
    smooth = (length / wavelength - low) / (high - low)
    between = ~(wavelength < length / high) & ~(wavelength > length / low)
    return torch.where(between, (1 - smooth) * scaled / factor + smooth * scaled, scaled)


def _yarn(settings: Mapping[str, Any], powers: Tensor, width: int, base: float) -> Tensor:
    length = _number(settings, "original_max_position_embeddings")

    def dimension(rotations: float) -> float:
        return (width * math.log(length / (rotations * 2 * math.pi))) / (2 * math.log(base))

    low, high = dimension(settings.get("beta_fast") or 32), dimension(settings.get("beta_slow") or 1)
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(width // 2, dtype=torch.float32) - low) / (high - low), 0, 1).to(powers.dtype)
    kept = 1 - ramp
    return 1.0 / (_number(settings, "factor") * powers) * (1 - kept) + 1.0 / powers * kept


def _yarn_attention_factor(settings: Mapping[str, Any]) -> float:
    if settings.get("attention_factor") is not None:
        return float(settings["attention_factor"])
    factor, mscale, all_dim = _number(settings, "factor"), settings.get("mscale"), settings.get("mscale_all_dim")
    return _mscale(factor, mscale) / _mscale(factor, all_dim) if mscale and all_dim else _mscale(factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _number(settings: Mapping[str, Any], key: str) -> float:
    value = settings.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"config.json: rope_type {settings['rope_type']} needs a number {key}, found {value!r}")
    return value
