"""An output that tests of the checks may spoil."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.conftest import MakeCheckpoint
from tests.tools.converted import converted
from tests.tools.spoiled import SIZES, Made


@pytest.fixture(scope="module")
def kept(tiny: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("kept") / "out"
    converted(tiny("deepseek_v3_mtp"), out, SIZES)
    return out


@pytest.fixture
def made(tiny: MakeCheckpoint, kept: Path, tmp_path: Path) -> Made:
    return Made(tiny("deepseek_v3_mtp"), Path(shutil.copytree(kept, tmp_path / "out")))
