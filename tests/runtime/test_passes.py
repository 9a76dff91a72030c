"""Passes over virtual ranks: who is told what, how much is in memory, and how faults come out."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from runtime.blocks.context import RankContext
from runtime.blocks.images import Images
from runtime.blocks.probe import NOBODY, Probe
from runtime.blocks.router import Routing
from runtime.blocks.weights import LayerWeights
from runtime.comm.comm import Comm
from runtime.comm.virtual import VirtualWorld
from runtime.loading.loader import Loader, LoadOptions
from runtime.opened import open_output
from runtime.passes import RankRun, batch_pass, next_piece
from shard_plans.errors import ManifestError
from shard_plans.families.model import Layer
from tests.conftest import MakeCheckpoint
from tests.tools import tamper
from tests.tools.sharded import CPU, convert_tiny

IDS = torch.tensor([3, 1, 4, 1, 5])


@dataclass(slots=True)
class Diary:
    """What one rank's watcher was told."""

    entries: list[tuple[str, int]] = field(default_factory=list)

    def looked(self, weights: LayerWeights, images: Images, deep: torch.Tensor | None) -> None:
        """Note it."""
        assert weights
        self.entries.append(("looked", len(images.grids)))

    def placed(self, tokens: torch.Tensor, x: torch.Tensor) -> None:
        """Note it."""
        self.entries.append(("placed", len(tokens)))

    def before(self, layer: Layer) -> Probe:
        """Note it."""
        self.entries.append(("before", layer.index))
        return NOBODY

    def after(
        self, layer: Layer, weights: LayerWeights, start: torch.Tensor, out: torch.Tensor, routing: Routing | None
    ) -> None:
        """Note it."""
        assert weights
        assert start.shape == out.shape == (5, 64)
        self.entries.append(("after", layer.index))


def run(out: Path, options: LoadOptions, diaries: list[Diary] | None = None, lockstep: bool = True) -> Loader:
    opened = open_output(out)
    grid = opened.plan.grid
    with Loader(out, opened.root, range(grid.world), 3, options) as loader:

        def rank(comm: Comm) -> None:
            ctx = RankContext(
                grid, grid.coordinate(comm.rank), comm, opened.model, opened.plan.experts, torch.float32, CPU
            )
            watch = None if diaries is None else diaries[comm.rank]
            made = RankRun(ctx, loader, opened.plan.stages, lockstep)
            piece = next_piece(made, IDS, torch.arange(5), made.new_caches())
            scores = batch_pass(made, [piece], watch, rows=torch.tensor([4]))
            assert (scores is not None) == made.is_last
            assert scores is None or scores.shape == (1, 256)

        VirtualWorld(grid.world).run(rank)
    return loader


def test_every_rank_hears_of_every_layer_and_sees_its_own(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    convert_tiny(tiny("llama"), tmp_path / "out", {"pp": 3, "tp": 2})
    diaries = [Diary() for _ in range(6)]
    run(tmp_path / "out", LoadOptions(CPU), diaries)
    for rank, diary in enumerate(diaries):
        expected = [("before", 0), ("before", 1), ("before", 2)]
        expected.insert(rank // 2 + 1, ("after", rank // 2))
        assert diary.entries == expected


@pytest.mark.parametrize("resident", [1, 2])
def test_in_lockstep_few_layers_are_in_memory(resident: int, tiny: MakeCheckpoint, tmp_path: Path) -> None:
    # replicas share no collective, so that nothing but the lockstep keeps one from running ahead of the others
    convert_tiny(tiny("llama"), tmp_path / "out", {"dp": 3})
    manifest = tamper.find(tmp_path / "out", "")
    sizes: dict[str, int] = {}
    for file, name in manifest:
        outside = "first" if name == "embed" else "last"
        section = name.split(".")[1] if name.startswith("layers.") else outside
        sizes[section] = sizes.get(section, 0) + tamper.tensor_offset(tmp_path / "out", file, name)[1]
    largest = sorted(sizes.values(), reverse=True)
    loader = run(tmp_path / "out", LoadOptions(CPU, resident=resident))
    assert loader.bytes_read == sum(largest)
    assert loader.peak <= sum(largest[:resident])
    free = run(tmp_path / "out", LoadOptions(CPU, resident=resident), lockstep=False)
    assert free.peak == sum(largest)


def test_a_fault_of_the_loader_ends_all_ranks_and_keeps_its_kind(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    out, file = tmp_path / "out", "stage-1-tp-1.safetensors"
    convert_tiny(tiny("llama"), out, {"tp": 2, "pp": 2})
    tamper.flip(out / file, tamper.tensor_offset(out, file, "layers.2.mlp.down")[0] + 7)
    with pytest.raises(ManifestError, match=rf"rank \d: .*{file}, tensor layers\.2\.mlp\.down"):
        run(out, LoadOptions(CPU))
