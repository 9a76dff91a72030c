"""Restore: the checkpoint comes back bit for bit, or not at all."""

from __future__ import annotations

import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from converter import restore as restoring
from converter.backward import deep, gather
from converter.check import check
from converter.output.lock import lock_file
from converter.restore import restore
from shard_plans.checkpoints.checkpoint import INDEX, open_checkpoint
from shard_plans.errors import CheckFailed, ManifestError, OutputError
from tests.conftest import MakeCheckpoint
from tests.tools import tamper
from tests.tools.converted import contents, converted
from tests.tools.plans import plan_id

CASES = [
    ("llama", {"tp": 4}), ("llama_odd", {"tp": 3, "pp": 2}), ("llama_single", {"tp": 2}), ("llama_bias", {"tp": 2}),
    ("qwen2", {"dp": 2, "pp": 3}), ("mixtral_odd", {"tp": 2, "ep": 2}), ("qwen3_moe_fp8", {"tp": 4, "ep": 2, "etp": 2}),
    ("deepseek_v3_mtp", {"pp": 2, "dp": 2, "tp": 2, "ep": 4}), ("deepseek_v3_full_q", {"tp": 4, "ep": 2, "etp": 1}),
]  # fmt: skip


def published(folder: Path) -> dict[str, bytes]:
    """What a checkpoint consists of; references of the tests lie beside it."""
    kept = {name: data for name, data in contents(folder).items() if name.startswith(("model", "config", "generation"))}
    assert kept
    return kept


@pytest.mark.parametrize(
    ("name", "sizes"), CASES, ids=lambda value: plan_id(value) if isinstance(value, dict) else value
)
def test_every_file_comes_back(tiny: MakeCheckpoint, tmp_path: Path, name: str, sizes: dict[str, int]) -> None:
    converted(tiny(name), tmp_path / "out", sizes)
    result = restore(tmp_path / "out", tmp_path / "back")
    assert contents(tmp_path / "back") == published(tiny(name))
    checkpoint = open_checkpoint(tiny(name))
    assert (result.tensors, result.bytes_written) == (len(checkpoint), checkpoint.total_bytes)
    assert (result.files, result.dropped) == (len(checkpoint.files), 0)


def test_what_was_left_out_stays_out(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    folder = tiny("deepseek_v3_mtp")
    converted(folder, tmp_path / "out", {"tp": 2}, mtp="drop")
    result = restore(tmp_path / "out", tmp_path / "back")
    before, after = open_checkpoint(folder), open_checkpoint(tmp_path / "back")
    kept = [name for name in before.names if not name.startswith("model.layers.3.")]
    assert sorted(after.names) == sorted(kept)
    assert result.dropped == len(before) - len(kept) > 0
    old, new = published(folder), contents(tmp_path / "back")
    for name in kept:
        here, there = before.number(name), after.number(name)
        assert (before.dtypes[here], before.shapes[here]) == (after.dtypes[there], after.shapes[there])
        files = before.files[int(before.file_numbers[here])].name, after.files[int(after.file_numbers[there])].name
        assert files[0] == files[1]
        starts = int(before.starts[here]), int(after.starts[there])
        size = int(before.sizes[here])
        assert old[files[0]][starts[0] : starts[0] + size] == new[files[0]][starts[1] : starts[1] + size]
    index = json.loads(new[INDEX])
    assert index["metadata"]["total_size"] == after.total_bytes


def test_a_restored_checkpoint_converts_to_the_same_bytes(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    converted(tiny("qwen3_moe_fp8"), tmp_path / "one", {"tp": 2, "ep": 2})
    restore(tmp_path / "one", tmp_path / "back")
    converted(tmp_path / "back", tmp_path / "two", {"tp": 2, "ep": 2})
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(block=st.integers(1, 3000), workers=st.integers(1, 5))
def test_the_size_of_blocks_changes_nothing(
    tiny: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory, block: int, workers: int
) -> None:
    folder = tmp_path_factory.mktemp("blocks")
    with pytest.MonkeyPatch.context() as patch:
        for module in (deep, gather, restoring):
            patch.setattr(module, "BLOCK", 4 + block * 997 % 40_000)
        converted(tiny("qwen3_moe_fp8"), folder / "out", {"tp": 4, "ep": 2, "etp": 2}, workers=workers)
        assert check(folder / "out", tiny("qwen3_moe_fp8"), workers).failures == ()
        restore(folder / "out", folder / "back", workers)
    assert contents(folder / "back") == published(tiny("qwen3_moe_fp8"))


def test_a_folder_with_files_is_refused(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    converted(tiny("llama"), tmp_path / "out")
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match="isn't empty"):
        restore(tmp_path / "out", tmp_path / "back")
    assert contents(tmp_path / "back") == {"notes.txt": b"mine"}
    with pytest.raises(OutputError, match="choose another folder"):
        restore(tmp_path / "out", tmp_path / "back" / "notes.txt")


def test_damage_is_not_restored(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    converted(tiny("llama"), tmp_path / "out", {"tp": 2})
    tamper.flip(tmp_path / "out" / "stage-0-tp-1.safetensors", -1)
    with pytest.raises(CheckFailed, match=r"stage-0-tp-1.safetensors, tensor .* chunk 0"):
        restore(tmp_path / "out", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_lost_tensor_is_not_restored(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    converted(tiny("llama"), tmp_path / "out")
    tamper.lose(tmp_path / "out", "stage-0-tp-0.safetensors", "layers.1.attn.norm")
    with pytest.raises(ManifestError, match="lacks 1 tensors of its checkpoint, its skip list has 0"):
        restore(tmp_path / "out", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_part_that_is_lost_is_not_restored(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    converted(tiny("llama"), tmp_path / "out", {"tp": 2})
    with tamper.opened(tmp_path / "out", "stage-0-tp-0.safetensors") as shard:
        own, data = shard.entry("layers.0.mlp.down"), shard.data["layers.0.mlp.down"]
    with tamper.opened(tmp_path / "out", "stage-0-tp-1.safetensors") as shard:
        shard.entry("layers.0.mlp.down")["sources"] = own["sources"]
        shard.data["layers.0.mlp.down"] = data
    with pytest.raises(ManifestError, match=r"lacks some of model.layers.0.mlp.down_proj.weight"):
        restore(tmp_path / "out", tmp_path / "back")


def test_a_header_that_is_not_its_own_is_refused(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    converted(tiny("llama_single"), tmp_path / "out")
    tamper.seal(tmp_path / "out", lambda root: root["source"]["files"][0].update(size=10_000))
    with pytest.raises(ManifestError, match=r"the header kept for model.safetensors can't be its own"):
        restore(tmp_path / "out", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_full_disk_leaves_nothing(tiny: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converted(tiny("llama"), tmp_path / "out")

    def no_space(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", no_space)
    with pytest.raises(OutputError, match="No space left"):
        restore(tmp_path / "out", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_two_at_once_are_kept_apart(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    """Each would else write into the other's files, and remove them when it fails."""
    converted(tiny("llama"), tmp_path / "out", {"tp": 2})
    back = tmp_path / "back"
    back.mkdir()
    handle = os.open(back, os.O_RDONLY)
    try:
        lock_file(handle)
        with pytest.raises(OutputError, match="another process is writing"):
            restore(tmp_path / "out", back)
    finally:
        os.close(handle)
    assert os.listdir(back) == []
    back.rmdir()

    def attempt(_: int) -> bool:
        try:
            restore(tmp_path / "out", back)
        except OutputError:
            return False
        return True

    with ThreadPoolExecutor(3) as pool:
        assert sum(pool.map(attempt, range(3))) == 1
    assert contents(back) == published(tiny("llama"))
