"""What mutated family tables brought to light, one test a kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from shard_plans.errors import FamilyError
from shard_plans.families.family import read_family
from shard_plans.families.model import Model, experts_a_token


@pytest.mark.parametrize("key", ["family", "extends"])
def test_a_name_longer_than_a_files_is_refused(tmp_path: Path, key: str) -> None:
    table = {"family": "mine", "match": "[mine]", "extends": "llama"} | {key: "x" * 300}
    path = tmp_path / "table.yaml"
    path.write_text("".join(f"{name}: {value}\n" for name, value in table.items()))
    with pytest.raises(FamilyError, match=f"{key} is 'xxx"):
        read_family(path)


def test_experts_without_topk_are_refused() -> None:
    model = Model("mine", {}, {}, {"experts": 8}, (), {}, False)
    with pytest.raises(FamilyError, match="mine has experts, but no size topk"):
        experts_a_token(model)
