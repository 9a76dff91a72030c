"""A shard file is checked before it is believed: its size, whose it is, and what it holds."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from runtime.loading.shelf import check_shard
from shard_plans.documents.manifest import read_manifest, read_shard_manifest
from shard_plans.errors import ManifestError
from tests.conftest import MakeCheckpoint
from tests.tools.sharded import convert_tiny

FILE = "stage-0-tp-0.safetensors"
OTHER = "stage-0-tp-1.safetensors"


@pytest.fixture
def output(tiny: MakeCheckpoint, tmp_path: Path) -> Path:
    convert_tiny(tiny("llama"), tmp_path / "out", {"tp": 2})
    return tmp_path / "out"


def open_file(out: Path, name: str = FILE) -> None:
    check_shard(out, read_manifest(out), name)


def test_a_whole_file_opens(output: Path) -> None:
    open_file(output)


def test_a_truncated_file_names_the_first_tensor_cut(output: Path) -> None:
    path = output / FILE
    os.truncate(path, path.stat().st_size - 1)
    last = read_shard_manifest(output, path.name).tensors[-1].name
    with pytest.raises(ManifestError, match=f"stage-0-tp-0.*{last}.*truncated"):
        open_file(output)


def test_another_ranks_file_is_refused(output: Path) -> None:
    shutil.copyfile(output / OTHER, output / FILE)
    with pytest.raises(ManifestError, match=r"stage-0-tp-0.*\"tp\":1.*another rank"):
        open_file(output)


def test_another_ranks_file_with_its_manifest_is_refused(output: Path) -> None:
    for name, other in ((FILE, OTHER), (FILE.replace("safetensors", "json"), OTHER.replace("safetensors", "json"))):
        shutil.copyfile(output / other, output / name)
    with pytest.raises(ManifestError, match=r"stage-0-tp-0\.json"):
        open_file(output)


@pytest.mark.parametrize("key", ["reshard_plan", "reshard_source"])
def test_a_file_of_another_plan_or_checkpoint_is_refused(key: str, output: Path) -> None:
    path = output / FILE
    raw = path.read_bytes()
    length = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:length])
    header["__metadata__"][key] = "0" * 32
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length - 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[length:])
    with pytest.raises(ManifestError, match="stage-0-tp-0.*another " + ("plan" if "plan" in key else "checkpoint")):
        open_file(output)
