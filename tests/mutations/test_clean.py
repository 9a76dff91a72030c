"""Nothing is found where nothing is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import MakeCheckpoint
from tests.mutations.clean import Clean, clean


def assert_passed(run: Clean) -> None:
    assert run.result.passed, (run.what, [check for check in run.result.checks if not check.passed])


@pytest.mark.parametrize("seed", range(2))
def test_a_right_run_passes(seed: int, tmp_path: Path, tiny: MakeCheckpoint) -> None:
    assert_passed(clean(seed, tmp_path, tiny))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_a_right_run_of_other_weights_passes(seed: int, tmp_path: Path) -> None:
    assert_passed(clean(seed, tmp_path))
