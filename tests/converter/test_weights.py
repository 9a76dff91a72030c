"""Conversions with `--weights`: every matrix against a reader and quantiser of the tests' own, from the files alone."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from converter.check import check
from converter.forward import recode_units
from converter.precision import recode
from shard_plans.documents.plan import Plan
from shard_plans.memory.payload import Payload, rank_weights
from shard_plans.placement.place import place
from tests.conftest import MakeCheckpoint
from tests.tools import crash, formats, reweighed, tamper
from tests.tools.converted import bound, contents, converted
from tests.tools.plans import make_plan, plan_id
from tests.tools.reweighed import matrices

FORMATS = {
    "bf16": ("BF16", None, 0.0), "fp16": ("F16", None, 0.0), "fp32": ("F32", None, 0.0),
    "fp8_block": ("F8_E4M3", "F32", 448.0), "fp8_block_ue8m0": ("F8_E4M3", "F8_E8M0", 448.0),
    "fp8_channel": ("F8_E4M3", "F32", 448.0), "int8_channel": ("I8", "F32", 127.0),
    "int4_group": ("I32", "BF16", 7.0), "mxfp4_group": ("U8", "U8", 6.0), "nvfp4": ("U8", "F8_E4M3", 6.0),
}  # fmt: skip
MATRICES = ("attention", "experts", "shared", "mlp")
SOURCES = {"llama": None, "deepseek_v3_fp8": (16, 16), "gpt_oss_mxfp4": (1, 32), "kimi_k25_int4": (1, 16)}
"""Tiny checkpoints, and their blocks."""
SIZES: dict[str, dict[str, int]] = {
    "llama": {"tp": 2}, "deepseek_v3_fp8": {"tp": 4, "ep": 2, "etp": 2}, "gpt_oss_mxfp4": {"tp": 2, "ep": 2},
    "kimi_k25_int4": {"tp": 2, "ep": 2},
}  # fmt: skip


def everything(name: str) -> dict[str, str]:
    """All matrices in that format."""
    return dict.fromkeys(MATRICES, name)


CASES = [
    # every format once in the fast set, every source at least twice; all of them in the slow one
    pytest.param(source, name, marks=() if (at + number) % 4 == 0 else pytest.mark.slow)
    for at, source in enumerate(SOURCES)
    for number, name in enumerate(FORMATS)
]


@pytest.mark.parametrize(("source", "name"), CASES)
def test_every_matrix_is_the_nearest_and_its_errors_are_those_of_float64(
    tiny: MakeCheckpoint, tmp_path: Path, source: str, name: str
) -> None:
    folder, out = tiny(source), tmp_path / "out"
    converted(folder, out, SIZES[source], weights=everything(name))
    values, scale_type, most = FORMATS[name]
    if source == "llama" and name == "bf16":
        assert not list(matrices(out, folder))  # it is stored so
        return
    seen = 0
    for matrix in matrices(out, folder, SOURCES[source]):
        seen += 1
        assert matrix.dtypes["values"] == values and matrix.dtypes.get("scale") == scale_type
        for stated in matrix.errors.values():
            largest, mean, cosine = formats.errors(matrix.stored, matrix.made)
            assert stated[:3] == pytest.approx([largest, mean, cosine], rel=1e-8, abs=1e-12), matrix.name
            assert stated[3:] == [0, 0]
        assert matrix.errors
        x = matrix.stored
        if matrix.block is None:
            expected = _plain(x, values)
        else:
            factors = formats.number(matrix.parts["scale"], "F8_E8M0" if scale_type == "U8" else str(scale_type))
            if "global_scale" in matrix.parts:
                whole = matrix.parts["global_scale"].view(np.float32)
                assert whole == np.float32(448 * 6) / np.float32(np.abs(x).max())
                factors = (factors.astype(np.float32) / whole).astype(np.float64)
            numbers = formats.quantised(x, factors, values, matrix.block)
            expected = numbers * formats.spread(factors, matrix.block, x.shape)
            top = formats.block_top(x, matrix.block)
            within = top <= most * factors * (4 / 3 if scale_type == "U8" else 1 + 2**-4)
            assert within.all() and (top > most * factors * 0.4).all()
        assert np.array_equal(matrix.made, expected.astype(np.float32)), matrix.name
    assert seen > 10
    assert check(out, folder).passed


def _plain(x: np.ndarray, dtype: str) -> np.ndarray:
    import torch

    kind = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[dtype]
    return torch.from_numpy(x.astype(np.float32)).to(kind).double().numpy()


@pytest.mark.parametrize("sizes", [{"tp": 4}, {"tp": 2, "pp": 3}, {"dp": 2, "tp": 2, "ep": 4}], ids=plan_id)
def test_numbers_and_errors_are_the_same_under_every_plan(
    tiny: MakeCheckpoint, tmp_path: Path, sizes: dict[str, int]
) -> None:
    folder = tiny("deepseek_v3_mtp")
    weights = {"attention": "int8_channel", "experts": "fp8_block", "shared": "nvfp4", "mlp": "mxfp4_group"}
    converted(folder, tmp_path / "one", weights=weights)
    converted(folder, tmp_path / "many", sizes, weights=weights)
    one = {matrix.name: matrix for matrix in matrices(tmp_path / "one", folder, (16, 16))}
    for matrix in matrices(tmp_path / "many", folder, (16, 16)):
        alone = one.pop(matrix.name)
        assert all(np.array_equal(part, alone.parts[kind]) for kind, part in matrix.parts.items())
        assert set(map(tuple, matrix.errors.values())) == set(map(tuple, alone.errors.values()))
    assert not one
    assert check(tmp_path / "many", folder).passed


def test_the_same_bytes_whatever_the_workers_and_parts(
    tiny: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _small(monkeypatch)
    folder, sizes, weights = tiny("deepseek_v3_fp8"), {"tp": 4, "ep": 2, "etp": 2}, everything("bf16")
    converted(folder, tmp_path / "one", sizes, workers=1, weights=weights)
    converted(folder, tmp_path / "many", sizes, workers=5, weights=weights)
    from converter.output.parts import Part

    for number in (2, 1, 3):
        converted(folder, tmp_path / "parts", sizes, weights=weights, part=Part(number, 3))
    assert contents(tmp_path / "one") == contents(tmp_path / "many") == contents(tmp_path / "parts")
    monkeypatch.undo()
    assert check(tmp_path / "one", folder).passed is False  # digests are of other chunks
    converted(folder, tmp_path / "large", sizes, weights=weights)
    for name in ("stage-0-tp-1.safetensors", "stage-0-ep-1-etp-0.safetensors"):
        assert (tmp_path / "large" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()


def _small(patch: pytest.MonkeyPatch) -> None:
    crash.many_units(patch)
    patch.setattr(recode_units, "UNIT", 2048)
    patch.setattr(recode, "TILE", 256)


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_an_interrupted_conversion_goes_on(
    own_tiny: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    _small(monkeypatch)
    folder, out, sizes, weights = own_tiny("deepseek_v3_fp8"), tmp_path / "out", {"tp": 2, "ep": 2}, everything("bf16")
    whole = converted(folder, tmp_path / "undisturbed", sizes, weights=weights)
    assert crash.killed_halfway(folder, out, sizes, whole.bytes_written, share=share, weights=weights)
    result = converted(folder, out, sizes, weights=weights)
    assert contents(out) == contents(tmp_path / "undisturbed")
    assert share * whole.bytes_written <= result.bytes_kept


@pytest.mark.slow
@pytest.mark.parametrize("moment", [1, 3, 27, 65, 82, 85, 144, 161, 184, 191, 195, 239, 294, 317, 334, 375])
@pytest.mark.parametrize("source", ["deepseek_v3_fp8", "gpt_oss_mxfp4"])
def test_killed_at_any_call_it_ends_with_the_same_bytes(
    tiny: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, moment: int
) -> None:
    _small(monkeypatch)
    folder, out, sizes = tiny(source), tmp_path / "out", {"tp": 2, "ep": 2}
    weights = {"attention": "int8_channel", "experts": "nvfp4", "shared": "fp8_channel", "mlp": "bf16", "head": "fp16"}
    converted(folder, tmp_path / "undisturbed", sizes, weights=weights)

    def part() -> None:
        crash.at_call(crash.CALLS, moment, crash.die)
        converted(folder, out, sizes, weights=weights, workers=1 + moment % 3)

    assert crash.forked(part) != 0
    converted(folder, out, sizes, weights=weights, workers=1 + moment % 4)
    assert contents(out) == contents(tmp_path / "undisturbed")


def test_ranks_alone_are_the_files_of_all(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    folder, sizes, weights = tiny("deepseek_v3_fp8"), {"tp": 4, "ep": 2, "etp": 2}, everything("int4_group")
    converted(folder, tmp_path / "all", sizes, weights=weights)
    converted(folder, tmp_path / "some", sizes, weights=weights, ranks=(1,))
    whole, some = contents(tmp_path / "all"), contents(tmp_path / "some")
    files = [name for name in some if name.startswith("stage")]
    assert files and all(some[name] == whole[name] for name in files)
    assert check(tmp_path / "some", folder).passed


def test_a_group_that_is_stored_so_already_is_kept_bit_for_bit(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    folder = tiny("llama")
    converted(folder, tmp_path / "plain", {"tp": 2})
    converted(folder, tmp_path / "same", {"tp": 2}, weights=everything("bf16") | {"embeddings": "bf16", "head": "bf16"})
    plain, same = contents(tmp_path / "plain"), contents(tmp_path / "same")
    data = [reweighed.read_file(tmp_path / kind / "stage-0-tp-1.safetensors") for kind in ("plain", "same")]
    assert {name: found[2].tobytes() for name, found in data[0].items()} == {
        name: found[2].tobytes() for name, found in data[1].items()
    }
    assert b"converted" not in same["stage-0-tp-1.json"] and plain.keys() == same.keys()


def test_nothing_else_changes(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    folder = tiny("deepseek_v3")
    converted(folder, tmp_path / "plain", {"tp": 2})
    converted(folder, tmp_path / "out", {"tp": 2}, weights={"experts": "fp8_block", "norms": "fp32"})
    before = {name: e for path in (tmp_path / "plain").glob("stage*.safetensors") for name, e in _tensors(path).items()}
    after = {name: e for path in (tmp_path / "out").glob("stage*.safetensors") for name, e in _tensors(path).items()}
    for name, found in after.items():
        if name.endswith("norm"):
            assert found[0] == "F32"
        elif ".experts." not in name:
            assert found == before[name]


def _tensors(path: Path) -> dict[str, tuple[str, bytes]]:
    return {name: (dtype, data.tobytes()) for name, (dtype, _, data) in reweighed.read_file(path).items()}


@pytest.mark.parametrize("name", ["fp8_block", "fp8_channel", "int4_group", "nvfp4", "fp16"])
def test_the_ledger_counts_what_is_written(tiny: MakeCheckpoint, tmp_path: Path, name: str) -> None:
    folder, sizes = tiny("deepseek_v3_fp8"), {"pp": 2, "tp": 2, "ep": 2}
    binding = bound(folder)
    base = make_plan(binding, sizes)
    plan = Plan(base.checkpoint, base.grid, base.stages, base.experts, weights=everything(name))
    counted = rank_weights(Payload(binding, weights=plan.weights), plan)
    converted(folder, tmp_path / "out", plan=plan)
    placement = place(binding, plan)
    for rank, (_, files) in enumerate(placement.ranks):
        tensors = [_tensors(tmp_path / "out" / file) for file in files]
        assert counted[rank] == sum(len(data) for file in tensors for _, data in file.values())


def test_not_a_number_is_counted_and_named(own_tiny: MakeCheckpoint, tmp_path: Path) -> None:
    folder = own_tiny("llama")
    name = "model.layers.1.self_attn.k_proj.weight"
    path = next(path for path in folder.glob("*.safetensors") if name in reweighed.read_file(path))
    raw = bytearray(path.read_bytes())
    length = 8 + int.from_bytes(raw[:8], "little")
    start = length + json.loads(raw[8:length])[name]["data_offsets"][0]
    raw[start + 20 : start + 26] = b"\xc0\x7f\x80\x7f\x80\xff"  # NaN, infinity, minus infinity in bfloat16
    path.write_bytes(raw)
    converted(folder, tmp_path / "out", {"tp": 2}, weights=everything("fp8_block"))
    found = {matrix.name: matrix for matrix in matrices(tmp_path / "out", folder)}
    assert {tuple(errors[3:]) for errors in found[name].errors.values()} == {(1, 2)}
    assert all(errors[3:] == [0, 0] for n, m in found.items() if n != name for errors in m.errors.values())
    assert np.isnan(found[name].made).sum() == 1
    assert check(tmp_path / "out", folder).passed


# Negative controls of the deep check: all digests are right, what they are of isn't.


@pytest.fixture
def out(tiny: MakeCheckpoint, tmp_path: Path) -> Path:
    weights = {"experts": "mxfp4_group", "attention": "fp8_block"}
    converted(tiny("deepseek_v3"), tmp_path / "out", {"tp": 2, "ep": 2}, weights=weights)
    return tmp_path / "out"


def test_a_swapped_half_of_a_byte(tiny: MakeCheckpoint, out: Path) -> None:
    with tamper.opened(out, "stage-0-ep-1-etp-0.safetensors") as shard:
        data = np.frombuffer(shard.data["layers.1.experts.down"], np.uint8)
        shard.data["layers.1.experts.down"] = (data >> 4 | data << 4).tobytes()
    finds(tiny, out, "layers.1.experts.down", "isn't what model.layers.1.mlp.experts")


def test_a_scale_of_another_block(tiny: MakeCheckpoint, out: Path) -> None:
    with tamper.opened(out, "stage-0-tp-1.safetensors") as shard:
        scale = np.frombuffer(shard.data["layers.0.attn.o.scale"], np.float32).copy()
        scale[0] *= 2
        shard.data["layers.0.attn.o.scale"] = scale.tobytes()
    finds(tiny, out, "layers.0.attn.o.scale", "isn't what model.layers.0.self_attn.o_proj.weight_scale_inv")


def test_an_error_that_is_made_up(tiny: MakeCheckpoint, out: Path) -> None:
    with tamper.opened(out, "stage-0-tp-0.safetensors") as shard:
        shard.entry("layers.2.attn.q_b")["sources"][0]["converted"]["errors"][0][1] *= 0.5
    finds(tiny, out, "layers.2.attn.q_b", "states for .* the errors")


def test_a_conversion_that_nobody_planned(tiny: MakeCheckpoint, out: Path) -> None:
    with tamper.opened(out, "stage-0-tp-0.safetensors") as shard:
        entry = shard.entry("layers.0.attn.norm")
        entry["sources"][0]["converted"] = {"from": "F32", "tensors": [entry["sources"][0]["tensor"]]}
    finds(tiny, out, "layers.0.attn.norm", "which the plan doesn't make")


def finds(tiny: MakeCheckpoint, out: Path, tensor: str, words: str) -> None:
    assert check(out).passed  # the hashes say nothing
    found = check(out, tiny("deepseek_v3"))
    assert not found.passed
    assert any(f.tensor == tensor and re.search(words, f.reason) for f in found.failures), found.failures


def test_a_copy_is_left_alone(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    """Given again, the same command finds the conversion whole; another precision is another plan."""
    folder = tiny("llama")
    weights = everything("fp8_block")
    converted(folder, tmp_path / "out", {"tp": 2}, weights=weights)
    assert converted(folder, tmp_path / "out", {"tp": 2}, weights=weights).bytes_written == 0
    with pytest.raises(Exception, match="another"):
        converted(folder, tmp_path / "out", {"tp": 2}, weights=everything("fp8_channel"))
    shutil.rmtree(tmp_path / "out")
