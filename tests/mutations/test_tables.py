"""A wrong table fools reshard's own reference too; `--reference transformers` shows it, and a layer that it spoils."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.mutations.models import Outputs
from tests.mutations.tables import TABLES, Table, try_table

QUICK = "gate named up"  # the library takes seconds to import
CASES = [pytest.param(t, id=t.name, marks=[] if t.name == QUICK else pytest.mark.slow) for t in TABLES]


@pytest.mark.parametrize("table", CASES)
def test_transformers_shows_a_wrong_table(table: Table, checkpoints: Path, tmp_path: Path) -> None:
    told = try_table(table, Outputs(checkpoints, tmp_path), tmp_path)
    assert told.failed == {"transformers"}
    where = re.match(r"layer (\d+)\b", told.where)
    assert where is not None and int(where[1]) in table.layers, told.where
