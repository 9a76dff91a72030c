"""What each group of weights costs in 8 bits is what a conversion of that group alone costs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import reshard
from converter.backward.gather import Shards
from converter.verbs import convert
from runtime.blocks.weights import Stored, dense
from runtime.checking.compare import cosine, divergence
from runtime.checking.rebuilt import Rebuilt
from runtime.checking.reference import Reference
from runtime.checking.rounded import rounded
from runtime.checking.sensitivity import EIGHT_BITS, Cost, sensitivity
from runtime.opened import open_output
from shard_plans.errors import RuntimeFault
from shard_plans.families.weights import formats
from shard_plans.placement.precision import in_precision
from shard_plans.verbs import open_binding
from tests.conftest import MakeCheckpoint
from tests.tools.cli import RunCli
from tests.tools.sharded import CPU, convert_tiny, relative

TEXTS = [torch.tensor([3, 14, 15, 92, 65]), torch.tensor([35, 89, 79])]


def costs(source: Path) -> dict[tuple[str, str], Cost]:
    with Reference(open_binding(source), torch.float32, CPU) as reference:
        return {(cost.group, cost.format): cost for cost in sensitivity(reference, TEXTS)}


@pytest.mark.parametrize(
    ("name", "group"),
    [("mixtral", "experts"), ("gpt_oss", "experts"), ("deepseek_v3_fp8", "shared"), ("qwen2", "embeddings")],
)
def test_a_group_costs_what_its_conversion_costs(name: str, group: str, tiny: MakeCheckpoint, tmp_path: Path) -> None:
    found = costs(tiny(name))
    assert {format for _, format in found} == set(EIGHT_BITS)
    for format in EIGHT_BITS:
        out = tmp_path / format
        convert(tiny(name), out, weights=f"{group}={format}")
        opened = open_output(out)
        binding = open_binding(tiny(name))
        shards = Rebuilt(Shards(out, opened.root))
        with (
            Reference(in_precision(binding, {group: format}), torch.float32, CPU, shards) as converted,
            Reference(binding, torch.float32, CPU) as own,
        ):
            converted.begin_all(TEXTS)
            own.begin_all(TEXTS)
            ours, theirs = converted.logits(), own.logits()
        cost = found[group, format]
        assert cost.divergence == pytest.approx(divergence(ours, theirs), rel=1e-6, abs=1e-12)
        assert cost.cosine == pytest.approx(cosine(ours, theirs), rel=1e-9)


def test_groups_are_those_of_the_model_and_the_costliest_comes_first(tiny: MakeCheckpoint) -> None:
    found = list(costs(tiny("deepseek_v3")).values())
    assert {cost.group for cost in found} == {"attention", "experts", "shared", "mlp", "embeddings", "head"}
    assert [cost.divergence for cost in found] == sorted((cost.divergence for cost in found), reverse=True)
    assert all(cost.divergence > 0 and 0.9 < cost.cosine < 1 for cost in found)
    assert all(cost.alike is not None and 0.5 < cost.alike <= 1 for cost in found)
    head = next(cost for cost in found if cost.group == "head")
    assert head.alike == 1.0  # nothing behind the head is routed


def test_what_is_stored_so_already_stays() -> None:
    plain = Stored(torch.randn(200, 130, generator=torch.Generator().manual_seed(1)))
    fp8, int8 = (rounded(plain, formats()[name], False) for name in EIGHT_BITS)
    assert isinstance(fp8, Stored) and isinstance(int8, Stored)
    assert rounded(fp8, formats()["fp8_block"], False) is fp8
    for one, worst in ((fp8, 0.07), (int8, 0.03)):
        assert 0 < relative(dense(one, torch.float32), plain.values) < worst
    assert relative(dense(fp8, torch.float32), dense(int8, torch.float32)) > 1e-3


def test_the_command_shows_a_table(tiny: MakeCheckpoint, tmp_path: Path, run_cli: RunCli) -> None:
    convert_tiny(tiny("mixtral"), tmp_path / "out", {"tp": 2})
    words = ("verify-and-run", tmp_path / "out", "--reference", tiny("mixtral"), "--sensitivity")
    assert "int8_channel" in run_cli(*words).stdout
    table = run_cli(*words, "--json").json["sensitivity"]
    assert {row["group"] for row in table} == {"attention", "experts", "embeddings", "head"}
    assert set(table[0]) == {"group", "format", "divergence", "log_likelihood", "cosine", "routes_alike"}
    with pytest.raises(RuntimeFault, match="--sensitivity needs --reference"):
        reshard.verify_and_run(tmp_path / "out", sensitivity=True)
