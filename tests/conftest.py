"""Fixtures: checkpoints made once and kept between runs, and the command run in this process."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests.checkpoints import cache
from tests.tools import cli

MakeCheckpoint = Callable[[str], Path]

# Times on a busy machine say nothing about an example; CI tries the same examples every time.
settings.register_profile("reshard", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("reshard")
torch.set_num_threads(1)  # tiny matrices: more threads only wait for one another, on a busy machine ten times as long


@pytest.fixture(scope="session")
def checkpoints(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which made checkpoints are kept: pytest's cache, or a temporary one where that is off."""
    kept: pytest.Cache | None = getattr(request.config, "cache", None)
    return kept.mkdir("checkpoints") if kept else tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session")
def tiny(checkpoints: Path) -> MakeCheckpoint:
    """Name -> folder of a tiny checkpoint (tests/checkpoints/variants.py). Shared: never write into it."""

    def make(name: str) -> Path:
        def write(folder: Path) -> None:
            from tests.checkpoints import tiny  # transformers takes seconds to import; a kept checkpoint needs none

            tiny.quiet()
            tiny.make_tiny(name, folder)

        return cache.made(checkpoints, name, write)

    return make


@pytest.fixture
def own_tiny(tiny: MakeCheckpoint, tmp_path: Path) -> MakeCheckpoint:
    """Name -> a copy of the tiny checkpoint that the test may spoil."""
    return lambda name: Path(shutil.copytree(tiny(name), tmp_path / name))


@pytest.fixture(scope="session")
def real(checkpoints: Path) -> Callable[[int], Path]:
    """Experts (0: none) -> folder of the trained checkpoint (tests/checkpoints/real.py). Never write into it."""

    def make(experts: int) -> Path:
        from tests.checkpoints import real

        source = real.download(checkpoints.parent / "checkpoint-sources")
        return cache.made(checkpoints, f"real-{experts}", partial(real.make_real, source, experts=experts))

    return make


@pytest.fixture(scope="session")
def run_cli() -> cli.RunCli:
    """`run_cli("check", folder, "--json", code=1).json`: tests/tools/cli.py."""
    return cli.run
