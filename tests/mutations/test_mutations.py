"""Every bug of the table is caught, at the layer, and in the half of it, where it was put."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mutations.bugs import BUGS
from tests.mutations.models import EVERY, Outputs
from tests.mutations.run import Cell, try_bug

Try = Callable[[str, str, int], "Cell | None"]
NAMES = [bug.name for bug in BUGS]
QUICK = (
    ("two experts exchanged", "glm4_moe_deep"), ("router's bias in bf16", "glm4_moe_deep"),
    ("vocabulary one row off", "qwen3_deep"),
    ("16 rows of the head lost", "qwen3_deep"), ("stream handed over one token off", "qwen3_deep"),
    ("norms' eps ten times", "qwen3_deep"), ("last layer lost", "qwen3_deep"), ("stale cache block", "glm4_moe_deep"),
    ("experts' scales one block off", "gpt_oss_deep"),
    ("window's block freed too early", "gpt_oss_deep"), ("attention across images", "kimi_k25"),
    ("places' rows and columns exchanged", "qwen3_vl_moe"), ("deep features of the next layer", "qwen3_vl_moe"),
    ("deep features handed over in the other order", "qwen3_vl_moe"), ("dealt images rank after rank", "kimi_k3"),
    ("the tower's MLP rows one off", "minimax_m3_vl"),
)  # fmt: skip
"""One of each kind, in seconds."""
SEEDS = 3


@pytest.fixture(scope="module")
def outputs(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    return Outputs(checkpoints, tmp_path_factory.mktemp("mutations"))


@pytest.fixture
def put(outputs: Outputs) -> Try:
    """(bug, family, seed) -> how it fared there."""
    rows = {bug.name: bug for bug in BUGS}
    return lambda name, family, seed: try_bug(rows[name], family, seed, outputs)


@pytest.mark.parametrize(("name", "family"), QUICK)
def test_a_bug_is_caught_where_it_is(name: str, family: str, put: Try) -> None:
    cell = put(name, family, 0)
    assert cell is not None
    assert cell.finding.caught and cell.finding.pinned, cell


def test_no_two_bugs_have_one_name() -> None:
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_bug_is_caught_wherever_it_is_put(name: str, put: Try) -> None:
    found = [put(name, family, seed) for family in EVERY for seed in range(SEEDS)]
    cells = [cell for cell in found if cell is not None]
    assert cells, "no model can have it"
    assert [cell for cell in cells if not (cell.finding.caught and cell.finding.pinned)] == []
