"""Every storage format as the layer arithmetic reads it, against tables of code points."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from runtime.blocks.weights import Stored, dense, dense_expert
from shard_plans.errors import RuntimeFault
from tests.tools import formats

ROWS, COLUMNS = 20, 64
CASES = {
    "fp8_block": ("F8_E4M3", "F32", (16, 32)), "fp8_channel": ("F8_E4M3", "F32", (1, 64)),
    "int8_channel": ("I8", "F32", (1, 64)), "int4_group": ("I32", "BF16", (1, 16)),
    "mxfp4_group": ("U8", "F8_E8M0", (1, 32)), "mxfp4_blocks": ("U8", "F8_E8M0", (1, 32)),
    "nvfp4": ("U8", "F8_E4M3", (1, 16)),
}  # fmt: skip
KINDS = {
    "F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8, "I32": torch.int32, "U8": torch.uint8, "F32": torch.float32,
    "BF16": torch.bfloat16,
}  # fmt: skip


def stored(name: str, seed: int = 0) -> tuple[Stored, formats.Array]:
    """Random codes as the runtime holds them, and what they stand for."""
    values, scale, block = CASES[name]
    random = np.random.default_rng(seed)
    pack = {"U8": 2, "I32": 8}.get(values, 1)
    item = {"I32": np.uint32}.get(values, np.uint8)
    codes = random.integers(0, np.iinfo(item).max, (ROWS, COLUMNS // pack), dtype=item, endpoint=True)
    if values == "F8_E4M3":
        codes[(codes & 0x7F) == 0x7F] = 0
    grid = (-(-ROWS // block[0]), -(-COLUMNS // block[1]))
    if scale == "F32":
        scales = (random.random(grid) + 0.1).astype(np.float32).view(np.uint32)
    elif scale == "BF16":
        scales = ((random.random(grid) + 0.1).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    else:
        scales = random.integers(100, 120, grid, dtype=np.uint8)
    parts, whole = {"values": codes, "scale": scales}, None
    if name == "nvfp4":
        parts["global_scale"] = np.array([3.7], np.float32).view(np.uint32)
        whole = torch.tensor([3.7])
    expected = formats.decode(parts, {"values": values, "scale": scale}, block)
    kind = torch.uint8 if scale == "F8_E8M0" else KINDS[scale]
    held = torch.from_numpy(codes.view(np.uint8)).view(KINDS[values])
    if name == "mxfp4_blocks":
        held = held.view(ROWS, COLUMNS // 32, 16)
    return Stored(held, torch.from_numpy(scales.view(np.uint8)).view(kind), name, block, whole), expected


@pytest.mark.parametrize("name", CASES)
def test_codes_are_what_the_tables_say(name: str) -> None:
    held, expected = stored(name)
    assert np.array_equal(dense(held, torch.float64).numpy(), expected)
    assert dense(held, torch.float32).dtype == torch.float32


@pytest.mark.parametrize("name", CASES)
def test_experts_are_read_one_by_one(name: str) -> None:
    one, two = stored(name, 1), stored(name, 2)
    whole = None if one[0].whole is None else torch.stack([h.whole for h, _ in (one, two) if h.whole is not None])
    scales = torch.stack([held.scale for held, _ in (one, two) if held.scale is not None])
    values = torch.stack([one[0].values.view(torch.uint8), two[0].values.view(torch.uint8)]).view(one[0].values.dtype)
    stack = Stored(values, scales, name, CASES[name][2], whole)
    assert np.array_equal(dense_expert(stack, 1, torch.float64).numpy(), two[1])
    assert not np.array_equal(dense_expert(stack, 0, torch.float64).numpy(), two[1])


def test_what_does_not_fit_together_is_refused() -> None:
    held, _ = stored("nvfp4")
    with pytest.raises(RuntimeFault, match="20x32 came without the scale of their matrix"):
        dense(Stored(held.values, held.scale, "nvfp4", (1, 16)), torch.float32)
    held, _ = stored("int8_channel")
    assert held.scale is not None
    with pytest.raises(RuntimeFault, match=r"values 20x64 in blocks of 1x64 need scales \(20, 1\), found 19x1"):
        dense(Stored(held.values, held.scale[:19], "int8_channel", (1, 64)), torch.float32)
