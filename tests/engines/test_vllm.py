"""vLLM itself, on a CPU: its sharded_state loader accepts the folder, and every parameter is what it loads by itself.

Optional: `make test-engines` makes an environment with the engine; without one these tests are skipped.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from converter.verbs import convert
from shard_plans.documents.plan import read_plan
from shard_plans.launch.command import partition
from tests.conftest import MakeCheckpoint
from tests.engines.checkpoints import TOWER, as_published, families, make_wide
from tests.engines.engine import NEEDED, compared
from tests.tools.plans import plan_id

pytestmark = NEEDED
LAYOUT = "vllm@0.33"
SIZES: list[dict[str, int]] = [
    stages | ranks
    for stages in ({}, {"pp": 2})
    for ranks in ({}, {"tp": 2}, {"tp": 4}, {"tp": 2, "ep": 2}, {"tp": 4, "ep": 4})
]


@pytest.mark.parametrize("sizes", SIZES, ids=plan_id)
def test_every_parameter_is_what_the_engine_loads_by_itself(
    sizes: dict[str, int], own_tiny: MakeCheckpoint, tmp_path: Path
) -> None:
    """Of every family; one process a rank builds them all, because the engine takes long to start."""
    names = families(sizes)
    folders = [(as_published(own_tiny(name)), tmp_path / f"{name}-out") for name in names]
    for source, out in folders:
        convert(source, out, layout=LAYOUT, **sizes)  # type: ignore[arg-type]
    for rank in compared(folders, "sharded_state", sizes, text=True):
        for name, found in zip(names, rank, strict=True):
            assert found.get("entries", 0) > 10, (name, found)
            assert (name, found["unequal"], found["others"]) == (name, [], [])


@pytest.mark.parametrize("sizes", [sizes for sizes in SIZES if "pp" in sizes], ids=plan_id)
def test_a_plan_s_own_stages_are_loaded_too(sizes: dict[str, int], own_tiny: MakeCheckpoint, tmp_path: Path) -> None:
    """The first stage holds the tower, hence other layers than vLLM would give it; docs/engines.md says what to set."""
    (name,) = TOWER
    source, out = as_published(own_tiny(name)), tmp_path / "out"
    convert(source, out, layout=LAYOUT, **sizes)  # type: ignore[arg-type]
    plan = read_plan(out / "plan.yaml")
    layers = partition(plan, plan.stages[-1][1])
    for (found,) in compared([(source, out)], "sharded_state", sizes, text=True, partition=layers):
        assert found.get("entries", 0) > 10, found
        assert (found["unequal"], found["others"]) == ([], [])


@pytest.mark.parametrize("sizes", SIZES, ids=plan_id)
def test_fp8_blocks_are_what_the_engine_loads_by_itself(sizes: dict[str, int], tmp_path: Path) -> None:
    """Experts are cut inside blocks by two or four ranks: the engine refines their scales to blocks of 64 or 32."""
    models = [("qwen3_moe", width) for width in (256, 384, 128)] + [("deepseek_v3", 512), ("kimi_k25", 512)]
    folders = []
    for number, (name, width) in enumerate(models):
        source = make_wide(name, "fp8", tmp_path / f"source{number}", moe_intermediate_size=width)
        folders.append((source, tmp_path / f"out{number}"))
        convert(*folders[-1], layout=LAYOUT, **sizes)  # type: ignore[arg-type]
    for rank in compared(folders, "sharded_state", sizes, text=True):
        for model, found in zip(models, rank, strict=True):
            assert found.get("entries", 0) > 10, (model, found)
            assert (model, found["unequal"], found["others"]) == (model, [], [])


def test_exchanged_ranks_are_seen(own_tiny: MakeCheckpoint, tmp_path: Path) -> None:
    """The comparison can fail: the loader itself takes any file of the right shapes."""
    source, out = as_published(own_tiny("qwen3_moe")), tmp_path / "out"
    convert(source, out, layout=LAYOUT, tp=2, ep=2)
    first, second = (out / f"model-rank-{rank}-part-0.safetensors" for rank in (0, 1))
    whole = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(whole)
    found = compared([(source, out)], "sharded_state", {"tp": 2, "ep": 2})
    assert all(len(rank["unequal"]) > 3 for (rank,) in found)


def test_a_text_alone_needs_the_flag_that_says_so(own_tiny: MakeCheckpoint, tmp_path: Path) -> None:
    source, out = as_published(own_tiny("kimi_k25")), tmp_path / "out"
    convert(source, out, layout=LAYOUT)
    ((rank,),) = compared([(source, out)], "sharded_state", {})
    assert "Missing keys ('vision_tower." in rank["refused"]


@pytest.mark.parametrize("spoil", ["lost scale", "stale alias"])
def test_the_loader_refuses_other_keys(spoil: str, own_tiny: MakeCheckpoint, tmp_path: Path) -> None:
    source, out = as_published(own_tiny("qwen3_moe")), tmp_path / "out"
    convert(source, out, layout=LAYOUT)
    path = out / "model-rank-0-part-0.safetensors"
    held = load_file(path)
    if spoil == "lost scale":
        del held["model.layers.0.self_attn.attn._k_scale"]
    else:
        held["model.layers.0.mlp.gate.weight"] = held["model.layers.0.mlp.experts.gate.weight"].clone()
    save_file(held, path)
    ((rank,),) = compared([(source, out)], "sharded_state", {})
    assert "refused" in rank
