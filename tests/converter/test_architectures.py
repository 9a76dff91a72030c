"""Every architecture that has a family table is cut and put together: names as published, bytes as stored."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from converter.check import check
from converter.restore import restore
from shard_plans.checkpoints.checkpoint import INDEX
from shard_plans.documents.manifest import ManifestTensor, read_manifest, read_shard_manifest
from shard_plans.errors import CheckpointError, GridError, PlanError
from tests.checkpoints.architectures import ARCHITECTURES
from tests.checkpoints.variants import MAIN
from tests.conftest import MakeCheckpoint
from tests.tools import tamper
from tests.tools.converted import bound, contents, converted
from tests.tools.plans import plan_id

PLANS: tuple[dict[str, int], ...] = (
    {}, {"tp": 2}, {"tp": 4}, {"tp": 2, "ep": 2}, {"dp": 2, "tp": 2, "ep": 4}, {"pp": 2, "tp": 2},
    {"tp": 4, "ep": 2, "etp": 2}, {"pp": 3},
)  # fmt: skip
DENSE = ("llama", "qwen2", "qwen3")
REFUSED = {
    **{(name, plan): "tp 4 doesn't divide groups 2" for name in ("deepseek_v4", "deepseek_v4_fp4") for plan in (2, 6)},
    **{("gpt_oss_mxfp4", plan): "inside 32 values that are stored together" for plan in (1, 2, 5, 6)},
    **{(name, plan): "has no experts" for name in DENSE for plan in (3, 4, 6)},
}
"""Cells that must be refused, and why: the columns of an expert's last matrix are 96 and kept by 32."""
QUICK = (3, 6)
CELLS = [
    pytest.param(name, plan, id=f"{name} {plan_id(PLANS[plan])}", marks=[] if quick else pytest.mark.slow)
    for name in (*MAIN, *ARCHITECTURES)
    for plan in range(len(PLANS))
    for quick in [name in ARCHITECTURES and plan in QUICK]
]


@pytest.mark.parametrize(("name", "number"), CELLS)
def test_every_byte_goes_out_and_comes_back(name: str, number: int, tiny: MakeCheckpoint, tmp_path: Path) -> None:
    source, plan = tiny(name), PLANS[number]
    if (name, number) in REFUSED:
        with pytest.raises((GridError, PlanError), match=REFUSED[name, number]):
            converted(source, tmp_path / "out", plan)
        return
    converted(source, tmp_path / "out", plan)
    found = check(tmp_path / "out", source)
    assert found.passed, found.failures
    restore(tmp_path / "out", tmp_path / "back")
    for name, data in contents(tmp_path / "back").items():
        assert data == (source / name).read_bytes(), name


@pytest.mark.parametrize("name", ["gpt_oss", "gpt_oss_mxfp4", "qwen3_vl_moe", "llama4_text", "qwen3_5_moe"])
def test_stacked_experts_lie_where_their_slot_says(name: str, tiny: MakeCheckpoint, tmp_path: Path) -> None:
    """An expert's bytes in a shard, found by the manifest alone, are the same entry of the stored tensor."""
    source = tiny(name)
    converted(source, tmp_path / "out", {"tp": 2, "ep": 2})
    root = read_manifest(tmp_path / "out")
    seen = 0
    for file in root.files:
        manifest = read_shard_manifest(tmp_path / "out", file.name, root)
        data = (tmp_path / "out" / file.name).read_bytes()[manifest.header_size :]
        for tensor in manifest.tensors:
            for piece in tensor.sources:
                if not piece.stacked or piece.experts is None:
                    continue
                stored, shape = stored_bytes(source, piece.tensor)
                held = np.frombuffer(data[tensor.offset :][: tensor.nbytes], np.uint8).reshape(len(piece.experts), -1)
                for place, expert in enumerate(piece.experts):
                    assert held[place].tobytes() == stored.reshape(shape[0], -1)[expert].tobytes()
                    seen += 1
    assert seen > 0
    assert sorted(root.ranks[0].files) != sorted(root.ranks[1].files)


def stored_bytes(source: Path, name: str) -> tuple[np.ndarray, tuple[int, ...]]:
    """The bytes of a stored tensor and its shape, read by the safetensors library."""
    index = json.loads((source / INDEX).read_text())["weight_map"]
    with safe_open(source / index[name], "pt") as file:
        tensor = file.get_tensor(name)
    return tensor.contiguous().view(torch.uint8).numpy(), tuple(tensor.shape)


def swap_experts(source: Path) -> None:
    """Exchange two experts of one stacked tensor."""
    checkpoint = bound(source).checkpoint
    number = checkpoint.number("model.layers.0.mlp.experts.gate_up_proj")
    path = source / checkpoint.files[int(checkpoint.file_numbers[number])].name
    start, size = int(checkpoint.starts[number]), int(checkpoint.sizes[number]) // 8
    raw = bytearray(path.read_bytes())
    first, second = raw[start : start + size], raw[start + size : start + 2 * size]
    raw[start : start + 2 * size] = second + first
    path.write_bytes(raw)


def test_exchanged_experts_are_found(own_tiny: MakeCheckpoint, tmp_path: Path) -> None:
    source = own_tiny("gpt_oss")
    converted(source, tmp_path / "out", {"tp": 2, "ep": 2})
    assert check(tmp_path / "out", source).passed
    swap_experts(source)
    failures = check(tmp_path / "out", source).failures
    assert {failure.tensor for failure in failures} == {"layers.0.experts.gate_up"}


def test_a_repeated_shape_is_checked_and_restored(own_tiny: MakeCheckpoint, tmp_path: Path) -> None:
    """INT4's `_shape` lies in no shard: convert refuses one that isn't the values', the deep check finds one."""
    source = own_tiny("kimi_k25_int4")
    converted(source, tmp_path / "out", {"tp": 2, "ep": 2})
    names = [t.name for f in read_manifest(tmp_path / "out").files for t in shard(tmp_path / "out", f.name)]
    assert not any("shape" in name for name in names)
    constants = read_manifest(tmp_path / "out").constants
    assert {constant.values for constant in constants} == {(32, 64), (64, 32)}
    spoil_shape(source)
    failures = check(tmp_path / "out", source).failures
    assert [f.tensor for f in failures] == [SHAPE]
    with pytest.raises(CheckpointError, match=rf"{SHAPE} must be \[32, 64\]"):
        converted(source, tmp_path / "again", {"tp": 2, "ep": 2})


SHAPE = "language_model.model.layers.1.mlp.experts.3.gate_proj.weight_shape"


def shard(out: Path, name: str) -> tuple[ManifestTensor, ...]:
    """The tensors of a shard file."""
    return read_shard_manifest(out, name, read_manifest(out)).tensors


def spoil_shape(source: Path) -> None:
    """Let one stored shape say something else."""
    checkpoint = bound(source).checkpoint
    number = checkpoint.number(SHAPE)
    path = source / checkpoint.files[int(checkpoint.file_numbers[number])].name
    tamper.flip(path, int(checkpoint.starts[number]))


def test_declared_values_are_part_of_the_manifest(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    """A manifest that declares another shape is found by the deep check."""
    source = tiny("kimi_k25_int4")
    converted(source, tmp_path / "out")

    def spoil(root: dict[str, list[dict[str, object]]]) -> None:
        root["constants"][0]["values"] = [32, 65]

    tamper.seal(tmp_path / "out", spoil)
    assert any("is declared [32, 65]" in failure.reason for failure in check(tmp_path / "out", source).failures)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c["text_config"].update(num_experts=8), r"has shape \[16, 64, 96\], config.json makes it 8 experts"),
        (lambda c: c["text_config"].update(moe_intermediate_size=64), r"gate_up_proj\[0\] has shape \[64, 96\]"),
    ],
)
def test_stacks_of_another_size_are_refused(
    change: Callable[[dict[str, dict[str, int]]], None], words: str, own_tiny: MakeCheckpoint, tmp_path: Path
) -> None:
    source = own_tiny("qwen3_vl_moe")
    config = json.loads((source / "config.json").read_text())
    change(config)
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=words):
        bound(source)
