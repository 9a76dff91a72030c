"""A wrong table passes against reshard's own reference, as the report says it can; transformers' layers show it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutations.models import Outputs
from tests.mutations.tables import TABLES, Table, try_table

QUICK = ("gate named up", "halves for pairs")
CASES = [pytest.param(t, id=t.name, marks=[] if t.name in QUICK else pytest.mark.slow) for t in TABLES]


@pytest.mark.parametrize("table", CASES)
def test_only_another_implementation_shows_a_wrong_table(table: Table, checkpoints: Path, tmp_path: Path) -> None:
    told = try_table(table, Outputs(checkpoints, tmp_path), tmp_path)
    assert told.alone
    assert told.layer == table.layer
