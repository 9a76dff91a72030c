"""What loads the weights of this process's ranks, once it is known that they fit."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack

import torch

from runtime.budget import Budget, Load, budget, refuse_too_large
from runtime.checking.reference import Reference
from runtime.comm.comm import Comm
from runtime.comm.devices import free_bytes
from runtime.loading.held import Held
from runtime.loading.loader import Loader, LoadOptions
from runtime.opened import Opened
from runtime.request import COMPUTE, Request
from shard_plans.documents.manifest import read_shard_manifest

KV = {torch.float32: "fp32", torch.float64: "fp32", torch.bfloat16: "bf16", torch.float16: "bf16"}
"""What a cache keeps that stores what is computed, in a word of the planner as long; of float64 twice the bytes."""


def open_loader(request: Request, comm: Comm | None, references: set[Reference]) -> tuple[Loader, Budget]:
    """The loader of the ranks, and what they take; RuntimeFault where this process's device has less."""
    options, opened, device = request.options, request.opened, request.device
    ranks = range(opened.plan.grid.world) if comm is None else [comm.rank]
    found: list[Budget] = []

    def admit(reserved: int, matrix: int) -> None:
        stored = [reference.largest for reference in references]
        largest = (sum(size for size, _ in stored), max(numbers for _, numbers in stored)) if stored else None
        tower = 0 if request.images is None else tower_bytes(opened, ranks)
        found.append(budget(opened, ranks, _load(request), device, reserved, matrix, largest, tower))
        refuse_too_large(found[0], device, _here(device), options.resident_layers)

    load = LoadOptions(
        device, options.check_hashes, options.resident_layers, _room(device) if request.answered else 0,
        options.threads, verify=options.verify_device, only={layer.index for layer in opened.model.forward_layers},
    )  # fmt: skip
    return Loader(opened.out, opened.root, ranks, opened.plan.stages[-1][1], load, admit), found[0]


def open_tower(request: Request, comm: Comm | None, stack: ExitStack) -> Loader | None:
    """What loads the vision tower, if there are images."""
    options = request.options
    load = LoadOptions(
        request.device, options.check_hashes, threads=options.threads, tower=True, verify=options.verify_device
    )
    return tower_loader(request.opened, comm, load, stack) if request.images is not None else None


def tower_loader(opened: Opened, comm: Comm | None, options: LoadOptions, stack: ExitStack) -> Loader | None:
    """What loads the vision tower, for this process's ranks of the first stage; None if it has none."""
    ranks = [rank for rank in range(opened.plan.grid.stage_ranks) if comm is None or comm.rank == rank]
    return stack.enter_context(Loader(opened.out, opened.root, ranks, 0, options)) if ranks else None


def tower_bytes(opened: Opened, ranks: Iterable[int]) -> int:
    """What the vision tower's weights take, of those of the ranks that are of the first stage."""
    files = {entry.at.rank: entry.files for entry in opened.root.ranks if not entry.at.stage}
    files = {rank: files[rank] for rank in ranks if rank in files}
    names = {name for read in files.values() for name in read}
    shards = {name: read_shard_manifest(opened.out, name, opened.root) for name in names}
    return sum(Held(shards, files, (), tower=True).memory())


def _load(request: Request) -> Load:
    options = request.options
    compute = COMPUTE[options.compute]
    answers = tuple(len(ids) + request.new_tokens for ids in request.answered)
    return Load(
        max(sum(map(len, request.texts)), sum(answers)), answers, compute.itemsize, options.cache.format or KV[compute],
        options.cache.block, 0 if request.images is None else len(request.images.pixels), options.cache.blocks,
    )  # fmt: skip


def _here(device: torch.device) -> int:
    """Processes that share the device's memory."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if device.type == "cpu" else 1


def _room(device: torch.device) -> int:
    """Bytes of weights that may stay in memory from one token to the next: half of what is free, shared fairly."""
    return free_bytes(device) // 2 // _here(device)
