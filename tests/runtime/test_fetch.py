"""Stretches into memory: hashed as they come, in place or through a ring of buffers, and once more on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from converter.streams.buffers import aligned
from converter.streams.hashing import TensorHash
from runtime.comm.devices import SideStream
from runtime.loading import ports
from runtime.loading.fetch import Fetcher
from runtime.loading.ports import DevicePort, HostPort, Port
from runtime.loading.stretches import arrange
from shard_plans.documents.digests import CHUNK
from shard_plans.documents.manifest import ManifestTensor, ShardManifest
from shard_plans.errors import ManifestError
from tests.tools.sharded import CPU

SIZES = (3 * CHUNK + 1000, 7, 0, 4096, 2 * CHUNK)


def shard(folder: Path) -> tuple[ShardManifest, bytes]:
    """A file of tensors of these sizes, and its bytes."""
    data = np.random.default_rng(0).bytes(sum(SIZES))
    tensors, at = [], 0
    for number, size in enumerate(SIZES):
        digest = TensorHash()
        digest.update(memoryview(data)[at : at + size])
        made = digest.finish()
        tensors.append(
            ManifestTensor(f"t{number}", "U8", (size,), at, size, None, "values", None, made.xxh3, made.chunks, ())
        )
        at += size
    (folder / "file").write_bytes(data)
    return ShardManifest("file", {}, "", "", len(data), 0, "", tuple(tensors)), data


def fetch(folder: Path, manifest: ShardManifest, port: Port, check: bool = True, again: str | None = None) -> bytes:
    """What is in memory then, from the first tensor on."""
    found = arrange([(manifest, manifest.tensors)])
    memory = torch.from_numpy(aligned(found.nbytes))
    fetcher = Fetcher(folder, {"file": manifest.size}, port, check, again)
    try:
        for stretch in found.stretches:
            fetcher.fetch(stretch, memory)
    finally:
        fetcher.close()
    return memory[: manifest.size].numpy().tobytes()


@pytest.fixture(params=["host", "ring"])
def port(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Port:
    monkeypatch.setattr(ports, "STEP", 1 << 20)
    monkeypatch.setattr("runtime.loading.fetch.STEP", 1 << 20)
    return HostPort() if request.param == "host" else DevicePort(SideStream(CPU))


def test_every_byte_arrives(tmp_path: Path, port: Port) -> None:
    manifest, data = shard(tmp_path)
    assert fetch(tmp_path, manifest, port, again="cpu") == data


@pytest.mark.parametrize("at", [0, CHUNK + 5, SIZES[0] + 3, sum(SIZES) - 1])
def test_a_flipped_bit_is_found_in_its_chunk(tmp_path: Path, port: Port, at: int) -> None:
    manifest, data = shard(tmp_path)
    spoiled = bytearray(data)
    spoiled[at] ^= 1
    (tmp_path / "file").write_bytes(spoiled)
    tensor = next(t for t in manifest.tensors if t.offset <= at < t.offset + t.nbytes)
    start = tensor.offset + (at - tensor.offset) // CHUNK * CHUNK
    with pytest.raises(ManifestError, match=rf"{tensor.name}: bytes {start} to .*damaged"):
        fetch(tmp_path, manifest, port)
    assert fetch(tmp_path, manifest, port, check=False) == spoiled


def test_a_file_that_shrank_is_noticed(tmp_path: Path, port: Port) -> None:
    manifest, data = shard(tmp_path)
    (tmp_path / "file").write_bytes(data[:-1])
    with pytest.raises(ManifestError, match="file"):
        fetch(tmp_path, manifest, port)


def test_a_corrupted_copy_is_found_behind_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes were right when they were read; one copy to the device changes a bit."""
    monkeypatch.setattr("runtime.loading.fetch.STEP", 1 << 20)
    manifest, data = shard(tmp_path)
    copies: list[int] = []

    def corrupt(self: SideStream, target: Tensor, source: Tensor) -> Any:
        target.copy_(source)
        copies.append(len(source))
        if len(copies) == 3:
            target[100] ^= 1

    monkeypatch.setattr(SideStream, "copy", corrupt)
    assert fetch(tmp_path, manifest, DevicePort(SideStream(CPU))) != data  # unnoticed where nobody looks again
    copies.clear()
    with pytest.raises(ManifestError, match=r"t0: bytes 0 to .* on device 0, after they were copied there"):
        fetch(tmp_path, manifest, DevicePort(SideStream(CPU)), again="device 0")
