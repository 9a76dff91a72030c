"""vLLM itself, on a CPU: `--load-format reshard` fills each rank's model as its ordinary loading does.

Optional: `make test-engines` makes an environment with the engine; without one these tests are skipped.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from converter.verbs import convert
from shard_plans.documents.plan import read_plan
from shard_plans.layouts.vllm_rules import plugin_reasons
from tests.conftest import MakeCheckpoint
from tests.engines.checkpoints import as_published, families, make_wide
from tests.engines.engine import NEEDED, compared
from tests.tools import tamper
from tests.tools.converted import bound
from tests.tools.plans import plan_id

pytestmark = NEEDED
WIDE = (("qwen3_moe", "fp8"), ("deepseek_v3", "fp8"), ("qwen3_moe", "int4"), ("deepseek_v3", "int4"))
"""Family, storage format; vLLM's own folders can't hold INT4."""
SIZES: tuple[dict[str, int], ...] = ({"tp": 2}, {"tp": 4}, {"tp": 2, "ep": 2}, {"tp": 2, "pp": 2}, {"dp": 2, "ep": 2})
"""Nor replicas that share experts, the last."""


@pytest.mark.parametrize("sizes", SIZES, ids=plan_id)
def test_every_parameter_is_what_the_engine_loads_by_itself(
    sizes: dict[str, int], own_tiny: MakeCheckpoint, tmp_path: Path
) -> None:
    """Before kernels repack them, of which a CPU has none for FP8 and INT4.

    What the planner says can't be loaded so is refused, by one rank at least.
    """
    sources = {name: as_published(own_tiny(name)) for name in families(sizes)}
    for name, format in WIDE:
        sources[f"{name}_{format}"] = make_wide(name, format, tmp_path / f"{name}_{format}")
    for name, source in sources.items():
        convert(source, tmp_path / f"{name}-out", **sizes)  # type: ignore[arg-type]
    folders = [(source, tmp_path / f"{name}-out" / "source") for name, source in sources.items()]
    ranks = zip(*compared(folders, "reshard", sizes), strict=True)
    for (name, source), found in zip(sources.items(), ranks, strict=True):
        reasons = plugin_reasons(bound(source), read_plan(tmp_path / f"{name}-out" / "plan.yaml"))
        assert bool(reasons) == any("refused" in rank for rank in found), (name, reasons, found)
        for rank in found if not reasons else ():
            assert rank["entries"] > 10
            assert (name, rank["unequal"], rank["others"]) == (name, [], [])


def test_a_parameter_that_ordinary_loading_leaves_unfilled_is_refused(tmp_path: Path) -> None:
    """A config that doesn't say that the router is plain: the engine makes scales for it, which nothing fills."""
    source = make_wide("qwen3_moe", "fp8", tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["lm_head"]
    (source / "config.json").write_text(json.dumps(config))
    convert(source, tmp_path / "out")
    ((rank,),) = compared([(source, tmp_path / "out" / "source")], "reshard", {})
    assert "aren't filled by the rank's shards, the first model.layers.0.mlp.gate.weight_scale_inv" in rank["refused"]


@pytest.mark.parametrize(
    ("spoil", "sizes", "words"),
    [
        ("bit", {}, "is damaged, so nothing is made of it"),
        ("file", {}, "can't be read: No such file"),
        ("plan", {"tp": 2}, "started with --tensor-parallel-size 1, the shards are for --tensor-parallel-size 2"),
        ("config", {}, "the shards are of another model"),
    ],
)
def test_what_does_not_match_is_refused(
    spoil: str, sizes: dict[str, Any], words: str, own_tiny: MakeCheckpoint, tmp_path: Path
) -> None:
    source, out = own_tiny("llama"), tmp_path / "out"
    convert(source, out, **sizes)
    (path, *_) = sorted(out.glob("*.safetensors"))
    if spoil == "bit":
        tamper.flip(path, path.stat().st_size - 5)
    elif spoil == "file":
        path.unlink()
    served, more = out / "source", {}
    if spoil == "config":
        served, more = source, {"shards": str(out)}
        with (source / "config.json").open("a") as file:
            file.write(" ")
    ((rank,),) = compared([(source, served)], "reshard", {}, **more)
    assert words in rank["refused"]
