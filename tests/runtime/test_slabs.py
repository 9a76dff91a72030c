"""Memory of layers: bounded, used again, and never while something that was handed out looks into it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from converter.streams.buffers import PAGE, Bytes
from runtime.blocks.weights import Stored
from runtime.loading import loader as loading
from runtime.loading.loader import Loader, LoadOptions
from runtime.loading.slabs import Slabs
from shard_plans.documents.manifest import read_manifest
from shard_plans.errors import RuntimeFault
from tests.conftest import MakeCheckpoint
from tests.tools.sharded import CPU, convert_tiny

POISON = 0xA5


def taken(slabs: Slabs, nbytes: int) -> Tensor:
    found = slabs.take(nbytes)
    assert found is not None
    return found


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Memory that comes back is overwritten at once; where it lies."""
    back, places = Slabs._back, list[int]()

    def spoil(self: Slabs, piece: Bytes) -> None:
        piece[:] = POISON
        places.append(piece.ctypes.data)
        back(self, piece)

    monkeypatch.setattr(Slabs, "_back", spoil)
    yield places


@pytest.fixture
def output(tiny: MakeCheckpoint, tmp_path: Path) -> Path:
    convert_tiny(tiny("llama"), tmp_path / "out", {"tp": 2})
    return tmp_path / "out"


def test_a_piece_is_used_again_when_its_last_view_is_gone() -> None:
    slabs = Slabs(2 * PAGE, threading.Condition())
    first = taken(slabs, 2 * PAGE)
    assert first.data_ptr() % PAGE == 0
    place, view = first.data_ptr(), first[16:32].view(torch.float32)
    del first
    assert slabs.take(PAGE) is None  # the view still needs all of it
    del view
    assert taken(slabs, 2 * PAGE).data_ptr() == place


def test_no_more_than_the_limit_unless_a_rank_waits_for_it() -> None:
    slabs = Slabs(3 * PAGE, threading.Condition())
    held = [taken(slabs, PAGE), taken(slabs, 2 * PAGE)]
    assert slabs.take(1) is None
    assert slabs.take(1, beyond=True) is not None
    del held
    assert taken(slabs, 3 * PAGE).numel() == 3 * PAGE  # free pieces made room


def test_what_was_handed_out_never_changes(poisoned: list[int], output: Path) -> None:
    """Every layer's weights of rank 0 are kept beyond their release, while all others come and go."""
    root = read_manifest(output)
    with Loader(output, root, range(2), 3, LoadOptions(CPU, resident=1)) as loader:
        for section in loader.sections[:2]:
            for rank in (0, 1):
                given = loader.get(rank, section)
                if (rank, section) == (0, loader.sections[0]):
                    held = given["embed"]
                    assert isinstance(held, Stored)
                    kept, copy = held.values, held.values.clone()
                    loader._batches._slabs.limit *= 2  # what is kept is kept beside what is reserved
                    del held
                del given
                loader.release(rank, section)
    assert poisoned  # memory did come back, and was overwritten
    assert kept.equal(copy)
    start = kept.data_ptr()
    assert not any(place <= start < place + PAGE for place in poisoned)


def test_a_layer_kept_beyond_its_release_is_noticed(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "PATIENCE", 0.05)
    root = read_manifest(output)
    with Loader(output, root, range(2), 3, LoadOptions(CPU, resident=1)) as loader:
        kept = [loader.get(rank, loader.sections[1]) for rank in (0, 1)]
        for section in loader.sections[:2]:
            for rank in (0, 1):
                loader.get(rank, section)
                loader.release(rank, section)
        with pytest.raises(RuntimeFault, match=r"rank 0 waits for layer 1, .* still in use"):
            loader.get(0, loader.sections[2])
        assert kept
        del kept
