"""Every code point of every small type against tables and torch, and rounding against both and exact arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from converter.precision import packing, rounding
from converter.precision.scales import choose
from tests.tools import formats

RANDOM = np.random.default_rng(3)


def test_every_code_of_e4m3_is_the_tables_and_torchs() -> None:
    codes = np.arange(256, dtype=np.uint8)
    ours = rounding.widened(codes, "F8_E4M3")
    assert np.array_equal(ours, formats.e4m3(codes), equal_nan=True)
    assert np.array_equal(ours, torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy(), equal_nan=True)
    assert np.isnan(ours).sum() == 2


def test_every_code_of_e8m0_is_the_tables_and_torchs() -> None:
    codes = np.arange(256, dtype=np.uint8)
    for word in ("F8_E8M0", "U8"):
        ours = rounding.widened(codes, word)
        assert np.array_equal(ours, formats.power(codes), equal_nan=True)
        assert np.array_equal(ours, torch.from_numpy(codes).view(torch.float8_e8m0fnu).float().numpy(), equal_nan=True)


def test_every_nibble_of_e2m1() -> None:
    # OCP Microscaling Formats 1.0, table 5: sign, two bits of exponent, one of mantissa.
    expected = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert rounding.E2M1_VALUES.tolist() == expected + [-value for value in expected]
    assert np.signbit(rounding.E2M1_VALUES[8])


def test_every_code_of_bfloat16_and_half_comes_back() -> None:
    codes = np.arange(1 << 16, dtype=np.uint16)
    for word, back, dtype in (("BF16", rounding.to_bf16, torch.bfloat16), ("F16", rounding.to_f16, torch.float16)):
        wide = rounding.widened(codes, word)
        assert np.array_equal(wide, torch.from_numpy(codes.view(np.int16)).view(dtype).float().numpy(), equal_nan=True)
        numbers = ~np.isnan(wide)
        assert np.array_equal(back(wide)[numbers], codes[numbers])
        assert np.isnan(rounding.widened(back(wide[~numbers]), word)).all()


@pytest.mark.parametrize("word", ["BF16", "F16"])
def test_plain_types_round_as_torch_does_and_saturate(word: str) -> None:
    bits = RANDOM.integers(0, 1 << 32, 1 << 18, dtype=np.uint32).view(np.float32)
    x = np.concatenate(
        [bits[np.isfinite(bits)], np.array([65519, 65520, 1e6, -1e6, 3.39e38, 3.4e38, -3.4e38, 1e-8], np.float32)]
    )
    dtype, most = {"BF16": (torch.bfloat16, rounding.BF16_MOST), "F16": (torch.float16, 65504.0)}[word]
    ours = rounding.widened(rounding.narrowed(x, word), word)
    theirs = torch.from_numpy(x).to(dtype).float().clamp(-most, most).numpy()
    assert np.array_equal(ours, theirs)
    odd = rounding.widened(rounding.narrowed(np.array([np.inf, -np.inf, np.nan, 1], np.float32), word), word)
    assert odd[:2].tolist() == [np.inf, -np.inf] and np.isnan(odd[2]) and odd[3] == 1


def test_e4m3_rounds_as_torch_does_and_saturates() -> None:
    x = RANDOM.standard_normal(1 << 18).astype(np.float32) * np.exp2(RANDOM.integers(-14, 10, 1 << 18))
    middles = (np.array(formats.E4M3)[1:] + np.array(formats.E4M3)[:-1]) / 2
    x = np.concatenate([x, middles, -middles, [0.0, -0.0, 448, 449, 1e30, 2**-10, 2**-11]]).astype(np.float32)
    theirs = torch.from_numpy(np.clip(x, -448, 448)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(rounding.E4M3.nearest(x), theirs)


@pytest.mark.parametrize("word", ["F8_E4M3", "U8"])
def test_a_quotient_is_rounded_once(word: str) -> None:
    grid = formats.GRIDS[word]
    middles = (np.array(grid)[1:] + np.array(grid)[:-1]) / 2
    scale = np.abs(RANDOM.standard_normal(50_000)).astype(np.float32) + np.float32(1e-3)
    x = (RANDOM.choice(middles, 50_000) * scale).astype(np.float32)  # so close to ties that a float32 quotient is one
    small = {"F8_E4M3": rounding.E4M3, "U8": rounding.E2M1}[word]
    expected = formats.nearest(x.astype(np.float64) / scale.astype(np.float64), grid)
    assert np.array_equal(small.nearest(x, scale), expected)
    # a control: rounding to float32 first goes wrong
    assert (small.nearest(x / scale) != expected).any()


@pytest.mark.parametrize("most", [7, 127])
def test_whole_numbers_are_rounded_once(most: int) -> None:
    scale = np.abs(RANDOM.standard_normal(50_000)).astype(np.float32) + np.float32(1e-3)
    x = ((RANDOM.integers(0, most, 50_000) + 0.5) * scale * RANDOM.choice([-1, 1], 50_000)).astype(np.float32)
    exact = np.rint(x.astype(np.float64) / scale.astype(np.float64))
    assert np.array_equal(rounding.to_whole(x, scale, most), np.clip(exact, -most, most))
    assert (np.rint(x / scale) != exact).any()


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 5), st.integers(1, 6), st.randoms(use_true_random=False))
def test_packing_comes_back(rows: int, words: int, random: object) -> None:
    codes = np.random.default_rng(rows * 100 + words).integers(0, 16, (rows, 8 * words), dtype=np.uint8)
    packed, packed_words = packing.pack_nibbles(codes), packing.pack_words(codes)
    assert np.array_equal(packing.unpack_nibbles(packed), codes)
    assert np.array_equal(packing.unpack_words(packed_words), codes)
    assert np.array_equal(formats.nibbles(packed), codes) and np.array_equal(formats.nibbles(packed_words), codes)
    assert packed[0, 0] == codes[0, 0] + 16 * codes[0, 1]  # the first in the low half
    assert packed_words[0, 0] == sum(int(code) << (4 * at) for at, code in enumerate(codes[0, :8]))


def test_mx_scales_follow_the_specification() -> None:
    # OCP Microscaling Formats 1.0, 6.3: the exponent of the largest power of two in the block, less E2M1's 2.
    top = np.array([6, 4, 3.99, 7.99, 8, 1, 0, 2.0**-126, 3e38], np.float32)
    codes = choose(top, 6.0, "U8", False, None).astype(int)
    assert codes.tolist() == [127, 127, 126, 127, 128, 125, 0, 0, 252]


def test_powers_of_two_for_e4m3_are_the_smallest_without_overflow() -> None:
    top = np.abs(RANDOM.standard_normal(1000)).astype(np.float32)
    top = np.concatenate([top, np.array([448, 449, 224, 896, 447.99, 2.0**-20 * 448], np.float32)])
    scale = formats.power(choose(top, 448.0, "F8_E8M0", False, None))
    assert (top <= 448 * scale).all() and (top > 224 * scale).all()
    assert np.array_equal(choose(top, 448.0, "F32", True, None).view(np.float32), scale)
