"""MXFP4 against a decoder that follows the bits of the standard, and what must be refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.blocks.mxfp4 import decode
from runtime.blocks.weights import Stored, dense, dense_expert
from shard_plans.errors import RuntimeFault


def number(code: int) -> float:
    """E2M1: a sign, two bits of exponent with bias 1, one of mantissa; no infinities."""
    sign, exponent, mantissa = -1.0 if code & 8 else 1.0, (code >> 1) & 3, code & 1
    return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def plain(values: Tensor, scale: Tensor, group: int) -> Tensor:
    """Decoded number by number, in float64."""
    rows, half = values.shape
    out = torch.zeros(rows, 2 * half, dtype=torch.float64)
    for row in range(rows):
        for column in range(2 * half):
            byte = int(values[row, column // 2])
            code = byte >> 4 if column % 2 else byte & 15
            out[row, column] = number(code) * 2.0 ** (int(scale[row, column // group]) - 127)
    return out


def random(rows: int, columns: int, group: int, low: int = 100, high: int = 140) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(rows * columns)
    values = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=draw)
    return values, torch.randint(low, high, (rows, -(-columns // group)), dtype=torch.uint8, generator=draw)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_byte_with_every_scale(dtype: torch.dtype) -> None:
    """Rows are the scales whose products `dtype` can hold, columns all bytes."""
    codes = torch.arange(4, 252, dtype=torch.uint8)[:, None]
    values = torch.arange(256, dtype=torch.uint8).repeat(len(codes), 1)
    assert decode(values, codes, 512, dtype).dtype == dtype
    assert torch.equal(decode(values, codes, 512, dtype).double(), plain(values, codes, 512))


def test_scales_at_both_ends() -> None:
    ends = torch.tensor([[0], [254], [255]], dtype=torch.uint8)
    values = torch.full((3, 1), 0x71, dtype=torch.uint8)  # 0.5 and 6
    wide = decode(values, ends, 2, torch.float64)
    assert wide[:2].tolist() == [[2.0**-128, 6 * 2.0**-127], [2.0**126, 6 * 2.0**127]]
    assert bool(wide[2].isnan().all())
    assert decode(values, ends, 2, torch.float32)[:2].double().tolist() == [wide[0].tolist(), [2.0**126, torch.inf]]


@pytest.mark.parametrize(("columns", "group"), [(64, 32), (48, 16), (40, 32), (6, 4), (16, 16)])
def test_groups_whole_refined_and_cut_short(columns: int, group: int) -> None:
    values, scale = random(5, columns, group)
    assert torch.equal(decode(values, scale, group, torch.float64), plain(values, scale, group))


def test_a_refined_scale_changes_nothing() -> None:
    values, scale = random(3, 96, 32)
    whole = decode(values, scale, 32, torch.float32)
    fine = scale.repeat_interleave(2, 1)
    assert torch.equal(decode(values[:, 24:], fine[:, 3:], 16, torch.float32), whole[:, 48:])


def test_the_low_half_of_a_byte_comes_first() -> None:
    one, scale = torch.tensor([[0x21]], dtype=torch.uint8), torch.tensor([[127]], dtype=torch.uint8)
    assert decode(one, scale, 2, torch.float32).tolist() == [[0.5, 1.0]]
    assert torch.equal(dense(Stored(one, scale, "mxfp4_group", (1, 2)), torch.float32), torch.tensor([[0.5, 1.0]]))


def test_one_expert_is_taken_out_of_a_stack() -> None:
    pairs = [random(6, 32, 8, 100 + expert, 130) for expert in range(4)]
    stack = Stored(torch.stack([v for v, _ in pairs]), torch.stack([s for _, s in pairs]), "mxfp4_group", (1, 8))
    listed = tuple(Stored(values, scale, "mxfp4_group", (1, 8)) for values, scale in pairs)
    for expert, (values, scale) in enumerate(pairs):
        expected = plain(values, scale, 8)
        assert torch.equal(dense_expert(stack, expert, torch.float64), expected)
        assert torch.equal(dense_expert(listed, expert, torch.float64), expected)
        assert torch.equal(dense(stack, torch.float64)[expert], expected)


VALUES, SCALE = random(4, 64, 32)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no scale": ({"scale": None}, "mxfp4_group values 4x32 came without scale"),
    "no group": ({"block": None}, "came without block size"),
    "other groups": ({"block": (1, 16)}, r"groups of 16 need uint8 scales \[4, 4\], found torch.uint8 \[4, 2\]"),
    "scales of other rows": ({"scale": SCALE[:3]}, r"found torch.uint8 \[3, 2\]"),
    "scales as numbers": ({"scale": SCALE.float()}, r"found torch.float32 \[4, 2\]"),
    "values as numbers": ({"values": VALUES.float()}, r"values torch.float32 \[4, 32\]"),
    "another format": ({"format": "nvfp4_group"}, "no block dequantises the format nvfp4_group"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused(what: str) -> None:
    change, message = REFUSED[what]
    given: dict[str, Any] = {"values": VALUES, "scale": SCALE, "format": "mxfp4_group", "block": (1, 32), **change}
    with pytest.raises(RuntimeFault, match=message):
        dense(Stored(**given), torch.float32)
