"""Weights stored as their publishers quantise them, with the fp32 weights that they stand for."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor

from tests.checkpoints import fp8

Tensors = dict[str, Tensor]
Quantized = tuple[Tensors, Tensor]
"""Stored tensors by name, and what they stand for."""
GROUP = 16
"""Columns that share a scale in the tiny INT4 checkpoints."""
CODES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""What the sixteen E2M1 codes stand for."""


def store(tensors: Tensors, pattern: str, quantize: Callable[[str, Tensor], Quantized]) -> tuple[Tensors, Tensors]:
    """Tensors, those that match `pattern` quantised; and what all of them stand for, under the plain names."""
    stored: Tensors = {}
    plain: Tensors = {}
    for name, tensor in tensors.items():
        if re.search(pattern, name):
            parts, plain[name] = quantize(name, tensor.float())
            stored |= parts
        else:
            stored[name] = plain[name] = tensor
    return stored, plain


def fp8_block(name: str, weight: Tensor) -> Quantized:
    """DeepSeek's: NAME F8_E4M3 [R, C] and NAME_scale_inv F32 by blocks."""
    values, scales, plain = fp8.quantize(weight)
    return {name: values, name + "_scale_inv": scales}, plain


def int4_group(name: str, weight: Tensor) -> Quantized:
    """compressed-tensors pack-quantized: _packed I32 [R, C/8] low bits first, code minus 8; _scale BF16; _shape I32."""
    rows, columns = weight.shape
    groups = weight.view(rows, columns // GROUP, GROUP)
    scale = (groups.abs().amax(-1) / 7).clamp(min=1e-6).to(torch.bfloat16)
    codes = (groups / scale.float()[..., None]).round().clamp(-8, 7)
    plain = (codes * scale.float()[..., None]).view(rows, columns)
    words = ((codes.view(rows, columns // 8, 8).long() + 8) << (4 * torch.arange(8))).sum(-1)
    packed = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    shape = torch.tensor([rows, columns], dtype=torch.int32)
    return {name + "_packed": packed, name + "_scale": scale, name + "_shape": shape}, plain


def mxfp4_blocks(name: str, weight: Tensor) -> Quantized:
    """gpt-oss's: [E, in, out] as _blocks U8 [E, out, in/32, 16], low half first, and _scales U8 [E, out, in/32]."""
    turned = weight.transpose(1, 2).contiguous()
    experts, rows, columns = turned.shape
    groups = turned.view(experts, rows, columns // 32, 32)
    exponent = torch.floor(torch.log2(groups.abs().amax(-1).clamp(min=1e-12))) - 2
    codes = ((groups / torch.exp2(exponent)[..., None])[..., None] - CODES).abs().argmin(-1).to(torch.uint8)
    plain = (CODES[codes.long()] * torch.exp2(exponent)[..., None]).view(turned.shape).transpose(1, 2).contiguous()
    blocks = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return {name + "_blocks": blocks, name + "_scales": (exponent + 127).to(torch.uint8)}, plain


def fp8_scale(name: str, weight: Tensor) -> Quantized:
    """DeepSeek-V4's: NAME F8_E4M3 [R, C], and in the place of `.weight` .scale F8_E8M0 by blocks."""
    rows, columns = weight.shape
    block = fp8.BLOCK
    padded = torch.zeros(-(-rows // block) * block, -(-columns // block) * block)
    padded[:rows, :columns] = weight
    tiles = padded.view(len(padded) // block, block, -1, block)
    exponent = torch.ceil(torch.log2(tiles.abs().amax((1, 3)).clamp(min=1e-12) / 448))
    grid = torch.exp2(exponent).repeat_interleave(block, 0).repeat_interleave(block, 1)[:rows, :columns]
    values = (weight / grid).to(torch.float8_e4m3fn)
    scale = (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    return {name: values, name.removesuffix(".weight") + ".scale": scale}, values.float() * grid


def fp4_scale(name: str, weight: Tensor) -> Quantized:
    """DeepSeek-V4's experts: NAME I8 [R, C/2], low half first, and .scale F8_E8M0 [R, C/32]."""
    parts, plain = mxfp4_blocks(name, weight.T[None])
    values, scale = parts[name + "_blocks"][0].flatten(-2), parts[name + "_scales"][0]
    stored = {name: values.view(torch.int8), name.removesuffix(".weight") + ".scale": scale.view(torch.float8_e8m0fnu)}
    return stored, plain[0].T.contiguous()


def v4_config() -> dict[str, object]:
    """The `quantization_config` that announces DeepSeek-V4's."""
    block = [fp8.BLOCK, fp8.BLOCK]
    return {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": block}


def int4_config() -> dict[str, object]:
    """The `quantization_config` that announces INT4 groups."""
    weights = {"num_bits": 4, "type": "int", "group_size": GROUP, "strategy": "group", "symmetric": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
