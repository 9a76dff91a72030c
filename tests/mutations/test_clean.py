"""Nothing is found where nothing is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import MakeCheckpoint
from tests.mutations.clean import Clean, clean
from tests.mutations.models import make


def assert_passed(run: Clean) -> None:
    assert run.result.passed, (run.what, [check for check in run.result.checks if not check.passed])


@pytest.mark.parametrize("seed", range(2))
def test_a_right_run_passes(seed: int, tmp_path: Path, tiny: MakeCheckpoint) -> None:
    assert_passed(clean(seed, tmp_path, tiny))


@pytest.mark.parametrize("seed", range(2))
def test_a_right_run_with_images_passes(seed: int, tmp_path: Path, tiny: MakeCheckpoint) -> None:
    def made(name: str) -> Path:
        return _kimi_k3(tmp_path / name) if name == "kimi_k3" else tiny(name)

    assert_passed(clean(seed, tmp_path, made, images=True))


def _kimi_k3(folder: Path) -> Path:
    make("kimi_k3", folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_a_right_run_of_other_weights_passes(seed: int, tmp_path: Path) -> None:
    assert_passed(clean(seed, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_a_right_run_of_other_weights_and_images_passes(seed: int, tmp_path: Path) -> None:
    assert_passed(clean(seed, tmp_path, images=True))
