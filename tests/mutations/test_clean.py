"""Nothing is found where nothing is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutations.clean import clean

RUNS, QUICK = 200, 4


@pytest.mark.parametrize("seed", [n if n < QUICK else pytest.param(n, marks=pytest.mark.slow) for n in range(RUNS)])
def test_a_right_run_passes(seed: int, tmp_path: Path) -> None:
    run = clean(seed, tmp_path)
    assert run.result.passed, (run.what, [check for check in run.result.checks if not check.passed])
