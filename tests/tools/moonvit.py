"""The vision tower and projector of Kimi K3, written again from its description: an oracle that shares no code.

Stored names in, plain torch inside: conv2d, interpolate, complex numbers for RoPE, one image at a time. `wrong` names
one mistake to make, for negative controls.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

MISTAKES = (
    "x and y swapped", "halves turned", "one axis after the other", "corners aligned", "table transposed",
    "exact gelu in the tower", "tanh gelu in the projector", "heads innermost", "causal", "images together",
    "frames apart", "no times", "times for one frame", "first frame only", "columns merged first", "no last norm",
    "eps of bfloat16", "eps of the text", "projector without its norm", "norm before the projector", "bicubic",
)  # fmt: skip
"""What `wrong` may be."""


Shape = tuple[int, int, int]
"""Frames, rows and columns of an image."""


def see(
    stored: Mapping[str, Tensor], config: Mapping[str, Any], pixels: Tensor, grid: Sequence[Shape], dtype: torch.dtype,
    wrong: str | None = None,
) -> Tensor:  # fmt: skip
    """The tokens of images [patches, 3, p, p]: [tokens, hidden] in `dtype`."""
    assert wrong is None or wrong in MISTAKES
    weights = {name: tensor.to(dtype) for name, tensor in stored.items() if name.startswith(("vision", "mm_"))}
    vision = config["vision_config"]
    lengths = [math.prod(image) for image in grid]
    parts = torch.split(pixels.to(dtype), lengths)
    images = [embed(weights, vision, part, image, wrong) for part, image in zip(parts, grid, strict=True)]
    turns = [cis(vision, image, dtype, wrong) for image in grid]
    for number in range(vision["vt_num_hidden_layers"]):
        if wrong == "images together":
            mixed = block(weights, vision, number, torch.cat(images), torch.cat(turns), 1, wrong)
            images = list(torch.split(mixed, lengths))
        else:
            images = [block(weights, vision, number, x, turn, image[0], wrong)
                      for x, turn, image in zip(images, turns, grid, strict=True)]  # fmt: skip
    if wrong != "no last norm":
        images = [norm(x, weights["vision_tower.encoder.final_layernorm.weight"], wrong) for x in images]
    return torch.cat([project(weights, merge(x, image, wrong), wrong) for x, image in zip(images, grid, strict=True)])


def norm(x: Tensor, weight: Tensor, wrong: str | None) -> Tensor:
    """Torch's own norm; without an eps it takes the machine epsilon."""
    eps = {"eps of bfloat16": 2.0**-7, "eps of the text": 1e-5}.get(wrong or "")
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def embed(
    weights: Mapping[str, Tensor], vision: Mapping[str, Any], pixels: Tensor, image: Shape, wrong: str | None
) -> Tensor:
    """Convolution, table, times: [t * h * w, width]."""
    t, h, w = image
    side = vision["patch_size"]
    x = functional.conv2d(pixels, weights["vision_tower.patch_embed.proj.weight"], stride=side).flatten(1)
    table = weights["vision_tower.patch_embed.pos_emb.weight"].permute(2, 0, 1)[None]
    if wrong == "table transposed":
        table = table.transpose(2, 3)
    if wrong == "bicubic":
        table = functional.interpolate(table, (h, w), mode="bicubic", align_corners=False)
    else:
        table = functional.interpolate(table, (h, w), mode="bilinear", align_corners=wrong == "corners aligned")
    places = table[0].permute(1, 2, 0).reshape(1, h * w, -1).repeat(t, 1, 1)
    if (t > 1 and wrong != "no times") or wrong == "times for one frame":
        width = x.shape[-1]
        for frame in range(t):
            for i in range(width // 2):
                angle = frame / 10000 ** (2 * i / width)
                places[frame, :, i] += math.sin(angle)
                places[frame, :, width // 2 + i] += math.cos(angle)
    return x + places.flatten(0, 1)


def cis(vision: Mapping[str, Any], image: Shape, dtype: torch.dtype, wrong: str | None) -> Tensor:
    """[t * h * w, head width / 2] complex: element 2i turns by the column, 2i + 1 by the row."""
    t, h, w = image
    width = vision["qkv_hidden_size"] // vision["vt_num_attention_heads"]
    turns = torch.empty((t, h, w, width // 2), dtype=torch.complex128)
    for i in range(width // 4):
        speed = 10000.0 ** (-4 * i / width)
        x = torch.exp(1j * speed * torch.arange(w, dtype=torch.float64))[None, None, :]
        y = torch.exp(1j * speed * torch.arange(h, dtype=torch.float64))[None, :, None]
        if wrong == "x and y swapped":
            x, y = y, x
        first, second = (i, width // 4 + i) if wrong == "one axis after the other" else (2 * i, 2 * i + 1)
        turns[..., first], turns[..., second] = x, y
    return turns.reshape(t * h * w, -1).to(torch.complex128 if dtype == torch.float64 else torch.complex64)


def turn(x: Tensor, turns: Tensor, wrong: str | None) -> Tensor:
    """X [patches, heads, width] turned, neighbouring dimensions in pairs."""
    if wrong == "halves turned":
        pairs = torch.complex(*x.chunk(2, dim=-1)) * turns[:, None]
        return torch.cat([pairs.real, pairs.imag], dim=-1)
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous()) * turns[:, None]
    return torch.view_as_real(pairs).flatten(-2)


def block(
    weights: Mapping[str, Tensor], vision: Mapping[str, Any], number: int, x: Tensor, turns: Tensor, frames: int,
    wrong: str | None,
) -> Tensor:  # fmt: skip
    """One block over one image's patches."""
    name, heads = f"vision_tower.encoder.blocks.{number}", vision["vt_num_attention_heads"]
    qkv = norm(x, weights[f"{name}.norm0.weight"], wrong) @ weights[f"{name}.wqkv.weight"].T
    if wrong == "heads innermost":
        q, k, v = (part.transpose(1, 2) for part in qkv.view(len(x), 3, -1, heads).unbind(1))
    else:
        q, k, v = (part.reshape(len(x), heads, -1) for part in qkv.chunk(3, dim=-1))
    q, k = turn(q, turns, wrong), turn(k, turns, wrong)
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(q.shape[-1])
    if wrong == "causal":
        scores = scores.masked_fill(torch.ones(len(x), len(x), dtype=torch.bool).triu(1), -math.inf)
    if wrong == "frames apart":
        frame = torch.arange(len(x)) // (len(x) // frames)
        scores = scores.masked_fill(frame[:, None] != frame, -math.inf)
    seen = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1)
    x = x + seen @ weights[f"{name}.wo.weight"].T
    inner = norm(x, weights[f"{name}.norm1.weight"], wrong) @ weights[f"{name}.mlp.fc0.weight"].T
    if wrong == "exact gelu in the tower":
        inner = inner * (1 + torch.erf(inner / math.sqrt(2))) / 2
    else:
        inner = inner / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
    return x + inner @ weights[f"{name}.mlp.fc1.weight"].T


def merge(x: Tensor, image: Shape, wrong: str | None) -> Tensor:
    """[h / 2 * w / 2, 4 * width]: frames averaged, upper row of two patches, then the lower one."""
    frames = x.view(*image, -1)
    flat = frames[0] if wrong == "first frame only" else frames.sum(0) / image[0]
    corners = [flat[0::2, 0::2], flat[0::2, 1::2], flat[1::2, 0::2], flat[1::2, 1::2]]
    if wrong == "columns merged first":
        corners[1], corners[2] = corners[2], corners[1]
    return torch.cat(corners, dim=-1).flatten(0, 1)


def project(weights: Mapping[str, Tensor], x: Tensor, wrong: str | None) -> Tensor:
    """Linear, GELU, linear, norm."""
    if wrong == "norm before the projector":
        x = functional.rms_norm(x, (x.shape[-1],), None, 1e-5)
    x = x @ weights["mm_projector.proj.0.weight"].T
    if wrong == "tanh gelu in the projector":
        x = functional.gelu(x, approximate="tanh")
    else:
        x = x * (1 + torch.erf(x / math.sqrt(2))) / 2
    x = x @ weights["mm_projector.proj.2.weight"].T
    if wrong == "projector without its norm":
        return x
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weights["mm_projector.post_norm.weight"]
