"""The search and the ledger count the same, whatever an engine makes of the weights."""

from __future__ import annotations

import pytest

from shard_plans.documents.plan import Workload
from shard_plans.memory.cluster import parse_cluster
from shard_plans.memory.payload import Payload
from shard_plans.placement.grid import Grid
from shard_plans.search.candidate import Outlines
from shard_plans.search.finish import finished
from tests.conftest import MakeCheckpoint
from tests.tools.converted import bound


@pytest.mark.parametrize("engine", ["reshard", "vllm", "vllm@0.7.2", "sglang@0.4.6"])
@pytest.mark.parametrize("family", ["gpt_oss_mxfp4", "deepseek_v3_fp8", "qwen3_moe_fp8", "llama"])
def test_needs_agree(tiny: MakeCheckpoint, family: str, engine: str) -> None:
    binding = bound(tiny(family))
    payload, load = Payload(binding), Workload(64, 4, engine=engine)
    outlines = Outlines(binding, payload, load, "keep")
    experts = bool(binding.model.sizes.get("experts"))
    for grid in (Grid(), Grid(tp=2, ep=2 if experts else 1, etp=1 if experts else 2), Grid(pp=2)):
        found = outlines.candidate(grid, outlines.outline(grid))
        plan = finished(payload, found, parse_cluster("1x8:80GB"), load, "keep")
        assert found.need == max(row.total for row in plan.ledger or ())
        assert outlines.least(grid, outlines.outline(grid)) <= found.need
