"""Dequantisation of stored weights, one matrix at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from runtime.alive.pulse import Pulse
from runtime.blocks.weights import LayerWeights, Readings, Stored, dense, dense_expert, expert_count, optional, take
from shard_plans.errors import RuntimeFault


def quantised(shape: tuple[int, ...], block: tuple[int, int], seed: int = 0) -> Stored:
    generator = torch.Generator().manual_seed(seed)
    values = (torch.randn(shape, generator=generator) * 100).to(torch.float8_e4m3fn)
    grid = (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))
    return Stored(values, torch.rand(grid, generator=generator) + 0.1, "fp8_block", block)


def by_hand(values: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    out = torch.empty(values.shape)
    for row in range(values.shape[0]):
        for column in range(values.shape[1]):
            out[row, column] = values[row, column].float() * scale[row // block[0], column // block[1]]
    return out


@pytest.mark.parametrize(
    ("shape", "block"), [((8, 12), (4, 4)), ((7, 10), (4, 4)), ((3, 5), (16, 16)), ((6, 9), (2, 3)), ((5, 4), (1, 1))]
)
def test_each_value_is_multiplied_by_its_blocks_scale(shape: tuple[int, int], block: tuple[int, int]) -> None:
    stored = quantised(shape, block)
    assert stored.scale is not None
    assert torch.equal(dense(stored, torch.float32), by_hand(stored.values, stored.scale, block))


def test_a_refined_scale_means_the_same() -> None:
    stored = quantised((8, 12), (4, 4))
    assert stored.scale is not None
    refined = Stored(stored.values, stored.scale.repeat_interleave(2, 0).repeat_interleave(4, 1), "fp8_block", (2, 1))
    assert torch.equal(dense(refined, torch.float32), dense(stored, torch.float32))


def test_a_scale_one_block_off_is_seen() -> None:
    stored = quantised((8, 12), (4, 4))
    assert stored.scale is not None
    off = Stored(stored.values, stored.scale.roll(1, 0), "fp8_block", (4, 4))
    right = dense(stored, torch.float32)
    assert float((dense(off, torch.float32) - right).norm() / right.norm()) > 1e-2


def test_one_expert_is_dequantised_alone() -> None:
    stored = quantised((3, 7, 10), (4, 4))
    assert stored.scale is not None
    whole = dense(stored, torch.float32)
    listed = [Stored(stored.values[i], stored.scale[i], "fp8_block", (4, 4)) for i in range(3)]
    for index in range(3):
        assert torch.equal(dense_expert(stored, index, torch.float32), whole[index])
        assert torch.equal(dense_expert(listed, index, torch.float32), whole[index])
    assert expert_count(stored) == expert_count(listed) == 3
    plain = Stored(torch.randn(2, 3, 4).bfloat16())
    assert torch.equal(dense_expert(plain, 1, torch.float32), plain.values[1].float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_products_are_rounded_to_float32_first(dtype: torch.dtype) -> None:
    stored = quantised((7, 10), (4, 4))
    result = dense(stored, dtype)
    assert result.dtype == dtype
    assert torch.equal(result, dense(stored, torch.float32).to(dtype))


def test_plain_values_change_only_their_type() -> None:
    values = torch.randn(3, 4).bfloat16()
    assert torch.equal(dense(Stored(values), torch.float64), values.double())
    bias = torch.tensor([7.0001])
    assert dense(Stored(bias), torch.float32) is bias


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (Stored(torch.ones(2, 2), torch.ones(1, 1), "mxfp4", (1, 32)), "dequantises the format mxfp4"),
        (Stored(torch.ones(2, 2).to(torch.float8_e4m3fn)), "2x2 came without a format"),
        (Stored(torch.ones(2, 2), torch.ones(1, 1)), "came without a format"),
        (Stored(torch.ones(2, 2), None, "fp8_block", (2, 2)), "without scale"),
        (Stored(torch.ones(2, 2), torch.ones(1, 1), "fp8_block"), "without block size"),
        (Stored(torch.ones(5, 4), torch.ones(2, 2), "fp8_block", (2, 2)), r"need scales \(3, 2\), found 2x2"),
    ],
)
def test_what_cannot_be_read_is_refused(stored: Stored, message: str) -> None:
    with pytest.raises(RuntimeFault, match=message):
        dense(stored, torch.float32)


def test_a_lookup_names_what_is_missing() -> None:
    weights: LayerWeights = {"attn.q": Stored(torch.ones(1)), "experts.up": (Stored(torch.ones(1)),)}
    assert optional(weights, "attn.q.bias") is None
    with pytest.raises(RuntimeFault, match=r"attn\.k is missing; the layer holds attn\.q, experts\.up"):
        take(weights, "attn.k")
    with pytest.raises(RuntimeFault, match="is a list of 1 experts"):
        take(weights, "experts.up")


def test_unread_weights_are_noticed() -> None:
    read = Readings({"attn.q": Stored(torch.ones(1)), "attn.sinks": Stored(torch.ones(1))}, Pulse())
    assert "attn.sinks" in read and len(read) == 2 and set(read) == {"attn.q", "attn.sinks"}
    take(read, "attn.q")
    with pytest.raises(RuntimeFault, match=r"no block reads attn\.sinks"):
        read.refuse_unread()
    take(read, "attn.sinks")
    read.refuse_unread()
