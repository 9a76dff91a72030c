"""The loader: every byte, hashed, once, ahead of time but not too far, and loud when a file is wrong."""

from __future__ import annotations

import os
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from runtime.blocks.weights import LayerWeights, Stored
from runtime.loading.loader import Loader, LoadOptions
from runtime.loading.sections import FIRST, LAST
from shard_plans.documents.manifest import read_manifest, read_shard_manifest
from shard_plans.errors import ManifestError, RuntimeFault
from tests.conftest import MakeCheckpoint
from tests.tools.sharded import CPU, convert_tiny

LAYERS = 3


@pytest.fixture
def output(tiny: MakeCheckpoint, tmp_path: Path) -> Path:
    """Two stages, tp 2, dp 2, ep 4, FP8."""
    convert_tiny(tiny("deepseek_v3_fp8"), tmp_path / "out", {"tp": 2, "pp": 2, "dp": 2, "ep": 4})
    return tmp_path / "out"


def open_loader(out: Path, ranks: range | None = None, **options: int | bool) -> Loader:
    root = read_manifest(out)
    made = LoadOptions(CPU, **options)  # type: ignore[arg-type]
    return Loader(out, root, range(len(root.ranks)) if ranks is None else ranks, LAYERS, made)


def tensors(weights: LayerWeights) -> dict[str, Tensor]:
    """Values and scales by native name."""
    found = {}
    for name, stored in weights.items():
        assert isinstance(stored, Stored)
        found[name] = stored.values
        if stored.scale is not None:
            found[f"{name}.scale"] = stored.scale
    return found


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.view(torch.uint8).equal(b.view(torch.uint8))


def stored(out: Path, files: tuple[str, ...], section: int) -> dict[str, Tensor]:
    """What the files hold of a section, by another reader."""
    stem = "" if section in (FIRST, LAST) else f"layers.{section}."
    outside = {FIRST: ("embed",), LAST: ("norm", "head")}.get(section, ())
    return {
        name.removeprefix(stem): tensor
        for file in files
        for name, tensor in load_file(out / file).items()
        if (name.startswith(stem) if stem else name in outside)
    }


def walk(loader: Loader, ranks: range) -> None:
    """One pass: every rank gets and releases what it holds."""
    for section in loader.sections:
        for rank in ranks:
            if loader.holds(rank, section):
                loader.get(rank, section)
                loader.release(rank, section)


def wait_until(loader: Loader, loaded: int) -> None:
    deadline = time.monotonic() + 60
    while loader.bytes_read < loaded and time.monotonic() < deadline:
        time.sleep(0.005)
    assert loader.bytes_read == loaded


def section_bytes(out: Path, section: int) -> int:
    """Payload of a section in all files."""
    root = read_manifest(out)
    parts = [stored(out, (file.name,), section) for file in root.files]
    return sum(tensor.nbytes for part in parts for tensor in part.values())


@pytest.mark.parametrize("ring", [False, True])
def test_every_rank_gets_its_files_bit_for_bit(output: Path, ring: bool) -> None:
    root = read_manifest(output)
    with open_loader(output, ring=ring, verify=True) as loader:
        assert loader.sections == (FIRST, 0, 1, 2, LAST)
        for section in loader.sections:
            for entry in root.ranks:
                held = stored(output, entry.files, section)
                assert loader.holds(entry.at.rank, section) == bool(held)
                if held:
                    found = tensors(loader.get(entry.at.rank, section))
                    assert set(found) == set(held)
                    assert all(same(found[name], held[name]) for name in held)
                    loader.release(entry.at.rank, section)
        assert loader.resident == 0


def test_a_stage_holds_nothing_of_another(output: Path) -> None:
    with open_loader(output) as loader, pytest.raises(RuntimeFault, match="rank 0 holds nothing of the head"):
        loader.get(0, LAST)


def test_shared_files_are_read_once(output: Path) -> None:
    root = read_manifest(output)
    payload = sum(tensor.nbytes for file in root.files for tensor in read_shard_manifest(output, file.name).tensors)
    with open_loader(output) as loader:
        ours, replica = tensors(loader.get(0, FIRST))["embed"], tensors(loader.get(2, FIRST))["embed"]
        assert ours.data_ptr() == replica.data_ptr()
        for rank in (0, 1, 2, 3):
            loader.release(rank, FIRST)
        kept = ours.clone()
        for section in loader.sections[1:]:
            for rank in range(8):
                if loader.holds(rank, section):
                    loader.get(rank, section)
                    loader.release(rank, section)
        assert ours.equal(kept)  # nothing that was loaded later went there
        assert loader.bytes_read == payload


def test_one_rank_reads_its_own_files_only(output: Path) -> None:
    root = read_manifest(output)
    own = sum(t.nbytes for name in root.ranks[5].files for t in read_shard_manifest(output, name).tensors)
    with open_loader(output, range(5, 6)) as loader:
        assert loader.sections == (2, LAST)
        walk(loader, range(5, 6))
        assert loader.bytes_read == own


def test_loads_ahead_and_not_further(output: Path) -> None:
    sizes = [section_bytes(output, section) for section in (FIRST, 0, 1, 2, LAST)]
    with open_loader(output, resident=2) as loader:
        wait_until(loader, sum(sizes[:2]))  # before anyone asked
        time.sleep(0.05)
        assert loader.bytes_read == sum(sizes[:2])
        for rank in range(4):
            loader.get(rank, FIRST)
            loader.release(rank, FIRST)
        wait_until(loader, sum(sizes[:3]))
        for section, rank in [(section, rank) for section in (0, 1, 2, LAST) for rank in range(8)]:
            if loader.holds(rank, section):
                loader.get(rank, section)
                loader.release(rank, section)
        assert loader.peak <= max(a + b for a, b in pairwise(sizes))


def test_asking_further_than_what_may_be_resident_does_not_block(output: Path) -> None:
    with open_loader(output, resident=1) as loader:
        assert loader.get(4, 2)  # though no rank has released what comes before


def test_passes_are_streamed_again_unless_the_budget_keeps_them(output: Path) -> None:
    sizes = [section_bytes(output, section) for section in (FIRST, 0, 1, 2, LAST)]
    for budget, again in ((0, sum(sizes)), (sum(sizes[:2]), sum(sizes[2:])), (sum(sizes), 0)):
        with open_loader(output, budget=budget) as loader:
            assert loader.all_kept == (again == 0)
            walk(loader, range(8))
            assert loader.bytes_read == sum(sizes)
            walk(loader, range(8))
            assert loader.bytes_read == sum(sizes) + again


def test_a_tied_embedding_is_loaded_once_and_serves_as_head(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    convert_tiny(tiny("qwen2"), tmp_path / "out", {"tp": 2})
    with open_loader(tmp_path / "out") as loader:
        for _ in range(2):
            for section in loader.sections:
                weights = [loader.get(rank, section) for rank in (0, 1)]
                if section == LAST:
                    assert all("embed" in each and "norm" in each for each in weights)
                for rank in (0, 1):
                    loader.release(rank, section)
        embed = read_shard_manifest(tmp_path / "out", "stage-0-tp-0.safetensors").tensors
        size = next(tensor.nbytes for tensor in embed if tensor.name == "embed")
        total = sum(section_bytes(tmp_path / "out", section) for section in (FIRST, 0, 1, 2, LAST))
        assert loader.bytes_read == 2 * total - 2 * size


def spoil(out: Path, file: str, tensor: str) -> None:
    """Flip one bit in the middle of a tensor."""
    manifest = read_shard_manifest(out, file)
    found = next(entry for entry in manifest.tensors if entry.name == tensor)
    with open(out / file, "r+b") as handle:
        handle.seek(manifest.header_size + found.offset + found.nbytes // 2)
        byte = handle.read(1)[0]
        handle.seek(-1, os.SEEK_CUR)
        handle.write(bytes([byte ^ 8]))


def test_a_flipped_bit_wakes_every_waiting_rank_with_its_place(output: Path) -> None:
    name = "layers.2.experts.gate_up"
    spoil(output, "stage-1-ep-3-etp-0.safetensors", name)
    faults: list[str] = []

    def wait(loader: Loader, rank: int) -> None:
        try:
            loader.get(rank, 2)
        except ManifestError as fault:
            faults.append(str(fault))

    with open_loader(output) as loader:
        threads = [threading.Thread(target=wait, args=(loader, rank)) for rank in range(4, 8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    assert len(faults) == 4
    assert all("stage-1-ep-3" in fault and name in fault and "digest" in fault for fault in faults)


def test_unchecked_loading_does_not_look(output: Path) -> None:
    spoil(output, "stage-0-tp-0.safetensors", "layers.0.attn.o")
    with open_loader(output, check=False) as loader:
        walk(loader, range(8))
    with open_loader(output) as loader, pytest.raises(ManifestError, match=r"attn\.o"):
        walk(loader, range(8))


def test_a_closed_loader_wakes_its_waiters(output: Path) -> None:
    loader = open_loader(output)
    loader.close()
    with pytest.raises(RuntimeFault, match="closed"):
        loader.get(0, FIRST)


def test_few_files_are_open_at_a_time(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("converter.streams.handles.OPEN_FILES", 1)
    root = read_manifest(output)
    assert len(root.files) > 10
    before = len(os.listdir("/proc/self/fd"))
    with open_loader(output, threads=2) as loader:
        for section in loader.sections:
            for rank in range(8):
                if loader.holds(rank, section):
                    loader.get(rank, section)
                    assert (
                        len(os.listdir("/proc/self/fd")) <= before + 2 * 2
                    )  # a file of each thread, and its successor
                    loader.release(rank, section)


def test_a_rank_that_is_not_there(output: Path) -> None:
    with pytest.raises(ManifestError, match="no rank 8"):
        open_loader(output, range(9))
