"""Encoding and decoding of whole matrices against the tables of tests/tools/formats.py."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from converter.precision.codec import Coding
from converter.precision.errors import Errors, compare, unpack
from converter.precision.recode import band_rows, recode
from converter.precision.scales import of_matrix
from tests.tools import formats

CODINGS = {
    "bf16": Coding("BF16"),
    "fp16": Coding("F16"),
    "fp32": Coding("F32"),
    "fp8_block": Coding("F8_E4M3", "F32", (128, 128)),
    "fp8_block_bf16": Coding("F8_E4M3", "BF16", (16, 32)),
    "fp8_block_ue8m0": Coding("F8_E4M3", "F8_E8M0", (32, 32)),
    "fp8_channel": Coding("F8_E4M3", "F32", (1, 96)),
    "int8_channel": Coding("I8", "F32", (1, 96)),
    "int4_group": Coding("I32", "BF16", (1, 32)),
    "mxfp4": Coding("U8", "U8", (1, 32)),
    "nvfp4": Coding("U8", "F8_E4M3", (1, 16), True),
}
QUANTISED = [name for name, coding in CODINGS.items() if coding.scale]
Array = formats.Array


def a_matrix(rows: int = 70, columns: int = 96, seed: int = 0) -> Array:
    """Normal numbers whose size differs from row to row."""
    random = np.random.default_rng(seed)
    return (random.standard_normal((rows, columns)) * np.exp2(random.integers(-8, 8, (rows, 1)))).astype(np.float32)


def encoded(x: Array, coding: Coding) -> dict[str, Array]:
    """The parts of x."""
    return coding.encode(x, of_matrix(float(np.abs(x).max())) if coding.tensor_scale else None)


def decoded(parts: dict[str, Array], coding: Coding) -> Array:
    """What the tables make of the parts."""
    dtypes = {"values": coding.values, "scale": coding.scale or ""}
    return formats.decode(parts, dtypes, coding.block)


@pytest.mark.parametrize("name", CODINGS)
def test_what_is_encoded_reads_as_the_tables_say(name: str) -> None:
    coding, x = CODINGS[name], a_matrix()
    parts = encoded(x, coding)
    assert np.array_equal(coding.decode(parts, 96), decoded(parts, coding))
    largest, mean, cosine = formats.errors(x.astype(np.float64), decoded(parts, coding))
    assert cosine > 0.99 and mean < 0.4, (largest, mean, cosine)


@pytest.mark.parametrize("name", QUANTISED)
def test_numbers_are_the_nearest_to_the_quotient(name: str) -> None:
    coding, x = CODINGS[name], a_matrix()
    parts = encoded(x, coding)
    scale = coding.factors(parts).astype(np.float64)
    expected = formats.quantised(x.astype(np.float64), scale, coding.values, coding.block)
    made = decoded(parts, coding)
    assert np.array_equal(made, (expected * formats.spread(scale, coding.block, x.shape)).astype(np.float32))


@pytest.mark.parametrize("name", ["fp8_block", "fp8_channel", "int8_channel", "int4_group"])
def test_scales_put_the_largest_number_at_the_end(name: str) -> None:
    coding, x = CODINGS[name], a_matrix()
    top = formats.block_top(x, coding.block)
    most = np.float32({"F8_E4M3": 448, "I8": 127, "I32": 7}[coding.values])
    stated = coding.factors(encoded(x, coding))
    exact = top / most
    assert np.array_equal(stated, exact) if coding.scale == "F32" else np.allclose(stated, exact, rtol=2**-8)


def test_all_code_points_are_decoded() -> None:
    codes = np.arange(256, dtype=np.uint8)
    for coding in (CODINGS["fp8_block"], CODINGS["mxfp4"], CODINGS["int8_channel"]):
        values = np.tile(codes, (3, 1))
        columns = 256 * coding.pack
        if coding.scale == "U8":
            scale = np.random.default_rng(1).integers(0, 256, (3, 16), dtype=np.uint8)
        else:
            scale = np.abs(a_matrix(*_grid(coding, 3, columns))).view(np.uint32)
        block = (coding.block[0], columns) if coding.block[1] == 96 else coding.block
        coding = Coding(coding.values, coding.scale, block)
        parts = {"values": values, "scale": scale}
        with np.errstate(over="ignore"):
            assert np.array_equal(coding.decode(parts, columns), decoded(parts, coding), equal_nan=True)


def _grid(coding: Coding, rows: int, columns: int) -> tuple[int, int]:
    return -(-rows // coding.block[0]), 1 if coding.block[1] == 96 else -(-columns // coding.block[1])


@pytest.mark.parametrize("name", QUANTISED)
def test_zeros_stay_zero_and_not_a_number_stays_none(name: str) -> None:
    coding = CODINGS[name]
    x = np.zeros((140, 96), np.float32)
    parts = encoded(x, coding)
    assert not decoded(parts, coding).any()
    x = a_matrix(140)
    x[3, 5], x[3, 7], x[130, 70] = np.nan, np.inf, -np.inf
    block = np.s_[130 - 130 % coding.block[0] : 130 - 130 % coding.block[0] + coding.block[0]]
    kept = np.where(np.isfinite(x), x, 0)[block]
    parts = coding.encode(x, of_matrix(100.0) if coding.tensor_scale else None)
    made = decoded(parts, coding)
    assert np.isnan(made[3, 5])
    assert -2 * np.abs(kept).max() < made[130, 70] < 0  # as large as the block's other numbers let it be
    others = np.isnan(made)
    if coding.values == "F8_E4M3":
        assert others.sum() == 1  # the type has a NaN
    else:
        assert others.sum() <= coding.block[1]  # its block's scale says so


@pytest.mark.parametrize("source", CODINGS)
@pytest.mark.parametrize("target", CODINGS)
def test_every_format_becomes_every_other(source: str, target: str) -> None:
    old, new, x = CODINGS[source], CODINGS[target], a_matrix(140)
    stored = encoded(x, old)
    before = decoded(stored, old)
    whole = of_matrix(float(np.abs(before).max())) if new.tensor_scale else None
    made, errors = recode(old, new, stored, 96, whole)
    after = decoded(made, new)
    expected = formats.errors(before, after)
    assert (errors.largest, errors.mean, errors.cosine) == pytest.approx(expected, rel=1e-12, abs=1e-14)
    if new.values == "F32" or source == target == "mxfp4":
        assert np.array_equal(before, after) and errors.largest == 0 and errors.cosine == 1


def test_mxfp4_becomes_fp8_without_loss_where_exponents_allow() -> None:
    random = np.random.default_rng(4)
    values = random.integers(0, 256, (256, 128), dtype=np.uint8)
    near = random.integers(110, 124, (256, 8), dtype=np.uint8)  # 14 neighbouring exponents are all that E4M3 reaches
    near[0, :4], near[128, :4], values[[0, 128], :64] = 123, 123, 0x77  # the largest occurs in every block
    far = near.copy()
    far[5, 1], values[5, 16:32] = 90, 0x11
    old, new = CODINGS["mxfp4"], CODINGS["fp8_block"]
    made, errors = recode(old, new, {"values": values, "scale": near}, 256)
    assert errors.largest == 0 and errors.cosine == 1
    assert np.array_equal(decoded(made, new), decoded({"values": values, "scale": near}, old))
    scales = made["scale"].view(np.float32)
    assert np.array_equal(np.exp2(np.log2(scales)), scales)
    made, errors = recode(old, new, {"values": values, "scale": far}, 256)
    expected = formats.errors(decoded({"values": values, "scale": far}, old), decoded(made, new))
    assert errors.largest == expected[0] == 1.0 and errors.mean == pytest.approx(expected[1], rel=1e-12)


def test_scales_alone_are_widened() -> None:
    old, new = Coding("F8_E4M3", "F8_E8M0", (32, 32)), Coding("F8_E4M3", "F32", (32, 32))
    stored = encoded(a_matrix(64), old)
    made, errors = recode(old, new, stored, 96)
    assert np.array_equal(made["values"], stored["values"]) and errors.largest == 0


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(CODINGS)), st.sampled_from(sorted(CODINGS)), st.integers(1, 300), st.integers(0, 1000))
def test_bands_are_the_matrix(source: str, target: str, rows: int, seed: int) -> None:
    """Band by band, each by itself, gives what the whole gives."""
    old, new, x = CODINGS[source], CODINGS[target], a_matrix(rows, seed=seed)
    stored = encoded(x, old)
    whole = of_matrix(float(np.abs(x).max())) if new.tensor_scale else None
    everything, _ = recode(old, new, stored, 96, whole)
    step = band_rows(old, new, rows, 96)
    least = max(old.block[0], new.block[0])
    assert step == rows or step % least == 0
    total, made = Errors(), []
    for first in range(0, rows, least):
        band = {kind: part for kind, part in stored.items() if kind == "global_scale"}
        band["values"] = stored["values"][first : first + least]
        if old.scale:
            band["scale"] = stored["scale"][first // old.block[0] : -(-(first + least) // old.block[0])]
        parts, errors = recode(old, new, band, 96, whole)
        made.append(parts)
        total.add(errors)
    assert np.array_equal(np.concatenate([parts["values"] for parts in made]), everything["values"])
    if new.scale:
        assert np.array_equal(np.concatenate([parts["scale"] for parts in made]), everything["scale"])
    assert unpack(total.pack()) == [total]


def test_errors_leave_out_what_is_no_number() -> None:
    x, y = np.array([1, np.nan, 2, np.inf, 0, -np.inf], np.float32), np.array([1.5, np.nan, 2, 7, 0, 7], np.float32)
    found = compare(x, y)
    assert (found.nan, found.infinite, found.counted, found.largest, found.mean) == (1, 2, 2, 0.5, 0.25)
    assert found.cosine == pytest.approx(5.5 / np.sqrt(5 * 6.25))
    assert compare(np.zeros(3, np.float32), np.zeros(3, np.float32)).cosine == 1
    assert compare(np.ones(3, np.float32), np.zeros(3, np.float32)).cosine == 0
