"""The ledger's weights are the bytes that convert writes, rank by rank; counted from config.json alone too."""

from __future__ import annotations

from pathlib import Path

import pytest

import reshard
from shard_plans.documents.manifest import read_manifest, read_shard_manifest
from shard_plans.errors import GridError, PlanError
from shard_plans.verbs import open_model, plan_memory
from tests.checkpoints.architectures import ARCHITECTURES
from tests.checkpoints.variants import MAIN
from tests.conftest import MakeCheckpoint

PLANS: tuple[dict[str, int], ...] = (
    {"tp": 2, "ep": 2}, {"tp": 1}, {"tp": 2, "ep": 1, "etp": 2}, {"tp": 4, "ep": 4}, {"pp": 2, "tp": 2}, {"pp": 3},
    {"dp": 2, "tp": 2, "ep": 4}, {"dp": 2, "tp": 1, "ep": 2}, {"tp": 4, "ep": 2, "etp": 2},
    {"pp": 2, "dp": 2, "tp": 2, "ep": 2},
)  # fmt: skip
UNLIKE = {"qwen3_next", "kimi_k25_int4"}
"""Their configs announce more than is stored: a layer for multi-token prediction, INT4 beyond the experts."""


@pytest.mark.parametrize("name", sorted({*MAIN, *ARCHITECTURES}))
@pytest.mark.parametrize("number", [pytest.param(n, marks=pytest.mark.slow if n else []) for n in range(len(PLANS))])
def test_ledger_and_files_agree(name: str, number: int, tiny: MakeCheckpoint, tmp_path: Path) -> None:
    folder, sizes = tiny(name), dict(PLANS[number])
    model = open_model(folder)
    if not model.model.sizes.get("experts"):
        sizes = {axis: size for axis, size in sizes.items() if axis in ("tp", "pp", "dp")}
    cluster = f"1x{sizes.get('tp', 1) * sizes.get('pp', 1) * sizes.get('dp', 1)}:80GB"
    try:
        plan = plan_memory(model, cluster, **{"tp": 1, "pp": 1, "dp": 1, **sizes})
    except (GridError, PlanError):
        pytest.skip("the model can't be cut so")
    reshard.convert(folder, tmp_path / "out", plan)
    manifest = read_manifest(tmp_path / "out")
    payload = {
        file.name: sum(tensor.nbytes for tensor in read_shard_manifest(tmp_path / "out", file.name, manifest).tensors)
        for file in manifest.files
    }
    written = {rank.at.rank: sum(payload[name] for name in rank.files) for rank in manifest.ranks}
    assert plan.ledger is not None and {row.rank: row.weights for row in plan.ledger} == written
    if name not in UNLIKE:
        (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
        alone = plan_memory(tmp_path / "config.json", cluster, **{"tp": 1, "pp": 1, "dp": 1, **sizes})
        assert alone.ledger == plan.ledger and alone.stages == plan.stages
