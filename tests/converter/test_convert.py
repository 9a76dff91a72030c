"""Convert: the right bytes in the right files, from a source that stays what it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from converter.convert import convert
from shard_plans.documents.manifest import read_manifest, read_shard_manifest
from shard_plans.documents.plan import plan_digest
from shard_plans.errors import CheckpointError
from shard_plans.families.binding import Binding
from shard_plans.placement.place import place
from shard_plans.placement.shards import ShardTensor
from tests.conftest import MakeCheckpoint
from tests.tools.cli import RunCli
from tests.tools.converted import bound, contents, converted
from tests.tools.plans import make_plan, plan_id

ITEM = {"F8_E4M3": 1, "BF16": 2, "F32": 4}
CASES = [
    ("llama", {"tp": 4}), ("llama_odd", {"tp": 3, "pp": 2}), ("qwen2", {"dp": 2, "pp": 3}),
    ("mixtral_odd", {"tp": 2, "ep": 2}), ("deepseek_v3_fp8", {"tp": 4, "ep": 2, "etp": 2}),
    ("deepseek_v3_mtp", {"pp": 2, "dp": 2, "tp": 2, "ep": 4}), ("qwen3_moe_fp8", {"tp": 4, "ep": 2, "etp": 1}),
    ("llama_single", {}),
]  # fmt: skip


def stored(binding: Binding, number: int) -> np.ndarray:
    checkpoint = binding.checkpoint
    path = checkpoint.folder / checkpoint.files[int(checkpoint.file_numbers[number])].name
    start, size = int(checkpoint.starts[number]), int(checkpoint.sizes[number])
    dtype = f"u{ITEM[checkpoint.dtypes[number]]}"
    return np.frombuffer(path.read_bytes()[start : start + size], dtype).reshape(checkpoint.shapes[number])


def expected(binding: Binding, tensor: ShardTensor) -> bytes:
    """The bytes of a shard tensor, put together in the plainest way."""
    made = np.zeros(tensor.shape, f"u{ITEM[tensor.dtype]}")
    for source in tensor.sources:
        for position, number in enumerate(source.tensors.tolist()):
            part = stored(binding, number)
            for axis, cut in enumerate(source.cuts):
                part = np.take(part, [i // cut.repeat for a, b in cut.runs for i in range(a, b)], axis)
            target = made if source.experts is None else made[position]
            target[tuple(slice(at, at + n) for at, n in zip(source.at, part.shape, strict=True))] = part
    return made.tobytes()


@pytest.mark.parametrize(
    ("name", "sizes"), CASES, ids=lambda value: plan_id(value) if isinstance(value, dict) else value
)
def test_every_shard_holds_its_pieces(tiny: MakeCheckpoint, tmp_path: Path, name: str, sizes: dict[str, int]) -> None:
    binding = bound(tiny(name))
    plan = make_plan(binding, sizes)
    placement = place(binding, plan)
    result = convert(binding.checkpoint, binding, plan, placement, tmp_path / "out")
    root = read_manifest(tmp_path / "out")
    written = 0
    for file in placement.files:
        manifest = read_shard_manifest(tmp_path / "out", file.name, root)
        raw = (tmp_path / "out" / file.name).read_bytes()
        assert manifest.header_size % 4096 == 0
        assert [entry.name for entry in manifest.tensors] == [tensor.name for tensor in file.tensors]
        for tensor, entry in zip(file.tensors, manifest.tensors, strict=True):
            start = manifest.header_size + entry.offset
            assert raw[start : start + entry.nbytes] == expected(binding, tensor), tensor.name
            written += entry.nbytes
            if tensor.nbytes % 4096 == 0:
                assert start % 4096 == 0
        with safe_open(tmp_path / "out" / file.name, "np") as opened:
            assert set(opened.keys()) == {tensor.name for tensor in file.tensors}
            assert opened.metadata()["reshard_plan"] == plan_digest(plan)
    assert (result.bytes_written, result.ranks) == (written, plan.grid.world)
    assert result.tensors == sum(len(file.tensors) for file in placement.files)


def test_each_source_byte_is_read_once(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    for number, (name, sizes) in enumerate(CASES):
        result = converted(tiny(name), tmp_path / str(number), sizes)
        assert result.bytes_read == bound(tiny(name)).checkpoint.total_bytes, (name, sizes)


def test_the_same_bytes_whatever_the_workers(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    for workers in (1, 2, 8):
        converted(tiny("deepseek_v3_mtp"), tmp_path / str(workers), {"tp": 4, "ep": 2}, workers=workers)
    assert contents(tmp_path / "1") == contents(tmp_path / "2") == contents(tmp_path / "8")
    assert not [name for name in contents(tmp_path / "1") if name.endswith((".partial", ".lock"))]


def test_what_is_left_out_is_listed(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    result = converted(tiny("deepseek_v3_mtp"), tmp_path / "out", {"tp": 2}, mtp="drop")
    skipped = read_manifest(tmp_path / "out").skipped
    total = bound(tiny("deepseek_v3_mtp")).checkpoint.total_bytes
    assert result.skipped == sum(item.count for item in skipped) > 0
    assert result.bytes_read == total - sum(item.nbytes for item in skipped)


def test_progress_ends_at_the_total(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    result = converted(tiny("llama"), tmp_path / "out", {"tp": 2}, progress=lambda *call: calls.append(call))
    assert calls == sorted(calls)
    assert calls[-1] == (result.bytes_written, result.bytes_written)


def spoiled_weights(folder: Path) -> None:
    with open(next(folder.glob("model-00002*")), "r+b") as file:
        file.truncate(5000)


def spoiled_header(folder: Path) -> None:
    path = next(folder.glob("model-00001*"))
    path.write_bytes(path.read_bytes().replace(b'"format":"pt"', b'"format":"np"'))


def spoiled_config(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text() + " ")


@pytest.mark.parametrize("spoil", [spoiled_weights, spoiled_header, spoiled_config])
def test_a_source_that_changes_meanwhile_is_refused(
    own_tiny: MakeCheckpoint, tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    folder = own_tiny("qwen2")
    binding = bound(folder)
    plan = make_plan(binding)
    spoil(folder)
    with pytest.raises(CheckpointError, match=r"changed|bytes, not the"):
        convert(binding.checkpoint, binding, plan, place(binding, plan), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def doubled(folder: Path, same: bool) -> Path:
    """Makes an untied qwen2 say that it is tied; its head becomes the embedding where `same`."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    checkpoint = bound(folder).checkpoint
    embed, head = (checkpoint.number(name) for name in ("model.embed_tokens.weight", "lm_head.weight"))
    paths = [folder / checkpoint.files[int(checkpoint.file_numbers[number])].name for number in (embed, head)]
    size = int(checkpoint.sizes[embed])
    with open(paths[0], "rb") as source, open(paths[1], "r+b") as target:
        source.seek(int(checkpoint.starts[embed]))
        target.seek(int(checkpoint.starts[head]))
        if same:
            target.write(source.read(size))
    return folder


def test_a_doubled_embedding_is_compared(own_tiny: MakeCheckpoint, tmp_path: Path) -> None:
    folder = own_tiny("qwen2_untied")
    with pytest.raises(
        CheckpointError, match=r"ties model.embed_tokens.weight and lm_head.weight, .* differ from byte"
    ):
        converted(doubled(folder, False), tmp_path / "out")
    with pytest.raises(
        CheckpointError, match=r"ties model.embed_tokens.weight and lm_head.weight, .* differ from byte"
    ):
        converted(folder, tmp_path / "out", {"tp": 2}, ranks=(1,))  # some ranks alone are no excuse
    assert not (tmp_path / "out").exists()
    converted(doubled(folder, True), tmp_path / "out")


def test_what_a_plan_leaves_out_and_what_does_not_fit_is_said(
    tiny: MakeCheckpoint, tmp_path: Path, run_cli: RunCli
) -> None:
    source, out, plan = tiny("deepseek_v3_mtp"), tmp_path / "out", tmp_path / "plan.yaml"
    run_cli("plan-memory", source, "--cluster", "1x1:1MB", "--mtp", "drop", "-o", plan, code=1)
    ran = run_cli("convert", source, out, "--plan", plan, "--json")
    assert ran.json["fits"] is False and "doesn't fit its cards" in ran.stderr
    checked = run_cli("check", out, "--deep", source)
    assert f"not compared: {ran.json['skipped']} stored tensors" in checked.stdout
    assert run_cli("check", out, "--json").json["skipped"] == ran.json["skipped"] > 0
    assert f"{ran.json['skipped']} tensors of the source are missing" in run_cli("restore", out, tmp_path / "b").stdout
