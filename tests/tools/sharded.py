"""Runs an output's virtual ranks and keeps what every one of them computed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from converter.verbs import convert
from runtime.blocks.context import RankContext
from runtime.blocks.images import Images
from runtime.blocks.probe import NOBODY, Probe
from runtime.blocks.router import Routing
from runtime.blocks.weights import LayerWeights
from runtime.checking.checks import Check
from runtime.comm.comm import Comm
from runtime.comm.virtual import VirtualWorld
from runtime.loaders import tower_loader
from runtime.loading.loader import Loader, LoadOptions
from runtime.opened import open_output
from runtime.passes import RankRun, batch_pass, next_piece
from runtime.result import RunResult
from shard_plans.families.model import Layer, Model

CPU = torch.device("cpu")


@dataclass(slots=True)
class Watch:
    """Keeps the routing and the output of every layer of one rank."""

    routes: dict[int, Tensor] = field(default_factory=dict)
    hidden: dict[int, Tensor] = field(default_factory=dict)

    def looked(self, weights: LayerWeights, images: Images, deep: Tensor | None) -> None:
        """Nothing to do."""

    def placed(self, tokens: Tensor, x: Tensor) -> None:
        """Nothing to do."""

    def before(self, layer: Layer) -> Probe:
        """Nothing to do."""
        return NOBODY

    def after(self, layer: Layer, weights: LayerWeights, start: Tensor, out: Tensor, routing: Routing | None) -> None:
        """Keep them."""
        self.hidden[layer.index] = out
        if routing is not None:
            self.routes[layer.index] = routing.indices


@dataclass(frozen=True, slots=True)
class Computed:
    """What the ranks computed."""

    logits: list[Tensor]
    """Of every rank of the last stage."""
    watches: list[Watch]
    """One a rank."""


def run_output(
    out: Path,
    ids: Tensor,
    compute: torch.dtype = torch.float32,
    chunks: Sequence[int] | None = None,
    spoil: Callable[[Model], Model] | None = None,
    images: Images | None = None,
) -> Computed:
    """One prefill of ids [tokens] over all virtual ranks of `out`; or a pass for each chunk, through the cache.

    `spoil` changes the model that the ranks believe to run; `images` are those among the ids of a prefill.
    """
    opened = open_output(out)
    grid, model = opened.plan.grid, opened.model if spoil is None else spoil(opened.model)
    watches = [Watch() for _ in range(grid.world)]
    options = LoadOptions(CPU)
    with ExitStack() as stack:
        layers = len(opened.model.forward_layers)
        loader = stack.enter_context(Loader(out, opened.root, range(grid.world), layers, options))
        seen = None if images is None else tower_loader(opened, None, replace(options, tower=True), stack)

        def rank(comm: Comm) -> Tensor | None:
            at = grid.coordinate(comm.rank)
            ctx = RankContext(grid, at, comm, model, opened.plan.experts, compute, CPU)
            run = RankRun(ctx, loader, opened.plan.stages, lockstep=True, tower=seen)
            caches = None if chunks is None else run.new_caches()
            parts = [
                batch_pass(run, [next_piece(run, ids[places], places, caches, images)], watches[comm.rank], images)
                for places in torch.split(torch.arange(len(ids)), list(chunks or [len(ids)]))
            ]
            scores = [part for part in parts if part is not None]
            return torch.cat(scores) if scores else None

        found = VirtualWorld(grid.world).run(rank)
    return Computed([scores for scores in found if scores is not None], watches)


def convert_tiny(source: Path, out: Path, sizes: Mapping[str, int], family: Path | None = None) -> None:
    """Convert by parallel sizes alone, and by another family table than the bundled one."""
    known = {axis: sizes.get(axis) for axis in ("tp", "pp", "dp", "ep", "etp")}
    assert set(sizes) <= set(known)
    convert(
        source, out, tp=known["tp"], pp=known["pp"], dp=known["dp"], ep=known["ep"], etp=known["etp"], family=family
    )


def checks(result: RunResult) -> Mapping[str, Check]:
    """By name."""
    return {check.name: check for check in result.checks}


def failed(result: RunResult) -> set[str]:
    """Names of the checks that failed."""
    return {check.name for check in result.checks if not check.passed}


def relative(ours: Tensor, reference: Tensor) -> float:
    """||ours - reference|| / ||reference||."""
    return float((ours.double() - reference.double()).norm() / reference.double().norm())


def expected(folder: Path) -> dict[str, Tensor]:
    """What transformers computed for a tiny checkpoint."""
    return dict(load_file(folder / "reference.safetensors"))


def expected_routes(reference: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """Layer -> the experts that transformers chose [tokens, k], in ascending order."""
    found = {}
    for name, tensor in reference.items():
        match = re.fullmatch(r"router\..*\.layers\.(\d+)\..*\.indices", name)
        if match:
            found[int(match[1])] = tensor.sort(dim=-1).values
    return found
