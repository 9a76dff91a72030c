"""Declared constants: checked before anything is written, compared by the deep check, written by restore."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from converter.check import check
from converter.convert import convert
from converter.restore import restore
from shard_plans.documents.manifest import ConstantRegion, read_manifest
from shard_plans.errors import CheckFailed, CheckpointError, ManifestError
from shard_plans.placement.place import place
from shard_plans.placement.shards import Constant, Cut, Placement
from tests.conftest import MakeCheckpoint
from tests.tools import tamper
from tests.tools.converted import bound, contents
from tests.tools.plans import make_plan
from tests.tools.spoiled import only

TAIL = 8
NAMES = {"norm": "model.norm.weight", "layers.0.attn.o": "model.layers.0.self_attn.o_proj.weight"}


def write(folder: Path, name: str, index: int, value: bytes) -> None:
    """Set elements of a stored tensor, counted from the first."""
    checkpoint = bound(folder).checkpoint
    number = checkpoint.number(name)
    path = folder / checkpoint.files[int(checkpoint.file_numbers[number])].name
    with open(path, "r+b") as file:
        file.seek(int(checkpoint.starts[number]) + 2 * index)
        file.write(value)


def with_tails(folder: Path) -> Placement:
    """A placement in which the last columns of two tensors lie on no rank, because they are zero."""
    binding = bound(folder)
    placement = place(binding, make_plan(binding))
    constants, tensors = [], []
    for tensor in placement.files[0].tensors:
        if tensor.name in NAMES:
            (source,) = tensor.sources
            *outer, last = tensor.shape
            cuts = (*source.cuts[:-1], Cut(((0, last - TAIL),)))
            tensor = replace(tensor, shape=(*outer, last - TAIL), sources=(replace(source, cuts=cuts),))
            region = (*((0, size) for size in outer), (last - TAIL, last))
            constants.append(Constant(source.pattern, region, source.tensors, "zeros behind its columns"))
        tensors.append(tensor)
    return replace(placement, files=(replace(placement.files[0], tensors=tuple(tensors)),), constants=tuple(constants))


@pytest.fixture
def source(own_tiny: MakeCheckpoint) -> Path:
    """A llama whose final norm and first output projection end in zeros."""
    folder = own_tiny("llama_single")
    checkpoint = bound(folder).checkpoint
    for name in NAMES.values():
        shape = checkpoint.shapes[checkpoint.number(name)]
        for row in range(math.prod(shape[:-1])):
            write(folder, name, row * shape[-1] + shape[-1] - TAIL, bytes(2 * TAIL))
    return folder


def made(folder: Path, out: Path) -> None:
    binding = bound(folder)
    convert(binding.checkpoint, binding, make_plan(binding), with_tails(folder), out)


def test_zeros_are_recorded_compared_and_restored(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("converter.check.departures", lambda *_: ())  # this placement isn't the plan's
    made(source, tmp_path / "out")
    recorded = {item.pattern: item for item in read_manifest(tmp_path / "out").constants}
    assert recorded["model.norm.weight"] == ConstantRegion("model.norm.weight", ((56, 64),), "zeros behind its columns")
    assert set(recorded) == set(NAMES.values())
    assert check(tmp_path / "out", source).failures == ()
    restore(tmp_path / "out", tmp_path / "back")
    assert contents(tmp_path / "back") == {
        name: data for name, data in contents(source).items() if name.startswith(("model", "config", "generation"))
    }


@pytest.mark.parametrize(
    ("name", "index", "element", "value"),
    [
        ("model.norm.weight", 60, "60", "-0.0"),
        ("model.layers.0.self_attn.o_proj.weight", 128 * 3 + 121, "3, 121", "2.5"),
    ],
)
def test_what_is_not_zero_stops_before_anything_is_written(
    source: Path, tmp_path: Path, name: str, index: int, element: str, value: str
) -> None:
    write(source, name, index, np.float32(value).tobytes()[2:])
    with pytest.raises(CheckpointError, match=rf"{name} must be zero at .* its element \[{element}\] is {value};"):
        made(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_is_not_zero_there_fails_the_deep_check(source: Path, tmp_path: Path) -> None:
    made(source, tmp_path / "out")
    write(source, "model.norm.weight", 63, b"\1\0")
    assert only(check(tmp_path / "out", source))[1:] == (
        "model.norm.weight", "is declared zero in manifest.json, but isn't at row 63",
    )  # fmt: skip


def test_zeros_that_nobody_declares_are_missing(source: Path, tmp_path: Path) -> None:
    """A manifest that says nothing of a region leaves it uncovered: found by the deep check and by restore."""
    made(source, tmp_path / "out")
    tamper.seal(tmp_path / "out", lambda root: root["constants"].pop(0))
    assert (
        "row 0, column 120 and 511 more elements of this block are in no shard"
        in only(check(tmp_path / "out", source))[2]
    )
    with pytest.raises(ManifestError, match="lacks some of"):
        restore(tmp_path / "out", tmp_path / "back")


def test_a_region_too_large_is_found(source: Path, tmp_path: Path) -> None:
    made(source, tmp_path / "out")
    tamper.seal(tmp_path / "out", lambda root: root["constants"][0]["region"].__setitem__(-1, [0, 1000]))
    assert any("is declared to hold what BF16" in f.reason for f in check(tmp_path / "out", source).failures)
    tamper.seal(tmp_path / "out", lambda root: root["constants"][0]["region"].__setitem__(-1, [0, 20]))
    assert any("is declared zero in manifest.json" in f.reason for f in check(tmp_path / "out", source).failures)


def test_a_damaged_region_of_the_root_is_refused(source: Path, tmp_path: Path) -> None:
    made(source, tmp_path / "out")
    tamper.seal(tmp_path / "out", lambda root: root["constants"][0].update(region=[[1]]))
    with pytest.raises(CheckFailed, match=r"constants.0.region.0"):
        restore(tmp_path / "out", tmp_path / "back")
