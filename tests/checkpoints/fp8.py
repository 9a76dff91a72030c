"""FP8 with block scales, as DeepSeek publishes it."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 16
"""Rows and columns of a block in the tiny checkpoints; their matrices end in partial blocks as published ones do."""
LARGEST = 448.0
"""The largest finite float8_e4m3fn."""


def config(block: int = BLOCK) -> dict[str, object]:
    """The `quantization_config` that announces this storage."""
    return {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [block, block],
    }  # fmt: skip


def quantize(weight: Tensor, block: int = BLOCK) -> tuple[Tensor, Tensor, Tensor]:
    """Values F8_E4M3 [R, C], scales F32 [ceil(R/block), ceil(C/block)], and the fp32 weight that they stand for."""
    rows, columns = weight.shape
    tall, wide = -(-rows // block), -(-columns // block)
    padded = torch.nn.functional.pad(weight.float(), (0, wide * block - columns, 0, tall * block - rows))
    blocks = padded.view(tall, block, wide, block)
    scales = blocks.abs().amax((1, 3)).clamp(min=1e-12) / LARGEST
    stored = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    weight = (stored.float() * scales[:, None, :, None]).reshape(padded.shape)[:rows, :columns].contiguous()
    # Slicing goes through bytes: float8 has no indexing kernels on every build.
    octets = stored.view(torch.uint8).reshape(padded.shape)[:rows, :columns].contiguous()
    return octets.view(torch.float8_e4m3fn), scales, weight
