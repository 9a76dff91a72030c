"""Cold experts in host memory: the fewest that make the plan fit."""

from __future__ import annotations

from dataclasses import replace

from shard_plans.documents.plan import Plan, Workload
from shard_plans.families.binding import Binding
from shard_plans.families.dims import Share
from shard_plans.memory.cluster import parse_cluster
from shard_plans.memory.count import with_ledger
from shard_plans.memory.offload import offload
from shard_plans.memory.payload import Payload
from tests.conftest import MakeCheckpoint
from tests.tools.converted import bound
from tests.tools.plans import make_plan


def planned(binding: Binding, room: int, sizes: dict[str, int]) -> Plan:
    """A plan whose cards lack `-room` bytes, or have `room` left, on the fullest rank."""
    base = replace(
        make_plan(binding, sizes), cluster=parse_cluster("1x8:80GB"), workload=Workload(64, 1, utilization=1.0)
    )
    rows = with_ledger(base, binding).ledger or ()
    memory = max(row.total for row in rows) + room
    assert base.cluster is not None
    return with_ledger(
        replace(base, cluster=replace(base.cluster, card=replace(base.cluster.card, memory=memory))), binding
    )


def test_the_fewest_experts_go(tiny: MakeCheckpoint) -> None:
    binding = bound(tiny("mixtral"))
    payload = Payload(binding)
    moe = [layer.index for layer in binding.model.layers]
    expert = payload.expert(moe[0], Share(0, 1))
    topk, held = binding.model.sizes["topk"], binding.model.sizes["experts"] // 2 * len(moe)
    assert offload(payload, planned(binding, 0, {"tp": 2, "ep": 2})) is None
    found = offload(payload, planned(binding, -1, {"tp": 2, "ep": 2}))
    assert found is not None and found.enough and found.worst.held == held
    assert found.worst.experts == topk + 1 and found.worst.bytes == (topk + 1) * expert
    assert found.worst.staging == topk * expert and found.node_bytes == sum(each.bytes for each in found.ranks)
    more = offload(payload, planned(binding, -expert - 1, {"tp": 2, "ep": 2}))
    assert more is not None and more.worst.experts == topk + 2


def test_when_experts_alone_do_not_help(tiny: MakeCheckpoint) -> None:
    binding = bound(tiny("mixtral"))
    found = offload(Payload(binding), planned(binding, -(10**9), {"tp": 2, "ep": 2}))
    assert found is not None and not found.enough and found.worst.experts == found.worst.held
    assert found.worst.lacking > 0
    assert offload(Payload(bound(tiny("llama"))), planned(bound(tiny("llama")), -1, {})) is None
