"""The little checkpoint that documents are made of, and its plan's sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.little import write_little
from tests.tools.little_configs import CONFIGS, PLANS, little

NAME = "qwen3_moe"
SIZES = PLANS[NAME][0]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_little(tmp_path / "source", CONFIGS[NAME], little(NAME))
