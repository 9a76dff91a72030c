"""vLLM itself, on a CPU: `--load-format reshard` fills each rank's model as its ordinary loading does.

Optional: `make test-engines` makes an environment with the engine; without one these tests are skipped.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from converter.verbs import convert
from tests.conftest import MakeCheckpoint
from tests.engines.checkpoints import as_published, make_wide
from tests.engines.engine import NEEDED, compared
from tests.tools import tamper

pytestmark = NEEDED
CELLS: list[tuple[str, str | None, dict[str, int]]] = [
    ("qwen2", None, {"tp": 2, "pp": 2}), ("mixtral", None, {"tp": 2}), ("qwen3_moe", "int4", {"tp": 2}),
    ("deepseek_v3", "fp8", {"tp": 2}), ("deepseek_v3", "int4", {"tp": 2, "ep": 2}),
    ("qwen3_moe", "fp8", {"dp": 2, "ep": 2}), ("minimax_m2", None, {"tp": 2}), ("qwen3_next", None, {"tp": 2}),
    ("glm4_moe", None, {"tp": 2}), ("ernie4_5_moe", None, {"tp": 2}),
]  # fmt: skip
"""Family, storage format, sizes. INT4 and replicas that share experts are what vLLM's own folders can't hold."""


@pytest.mark.parametrize(("name", "format", "sizes"), CELLS, ids=str)
def test_every_parameter_is_what_the_engine_loads_by_itself(
    name: str, format: str | None, sizes: dict[str, int], own_tiny: MakeCheckpoint, tmp_path: Path
) -> None:
    """Before kernels repack them, for which a CPU has none of these formats."""
    source = as_published(own_tiny(name)) if format is None else make_wide(name, format, tmp_path / "source")
    convert(source, tmp_path / "out", **sizes)  # type: ignore[arg-type]
    for (rank,) in compared([(source, tmp_path / "out" / "source")], "reshard", sizes):
        assert "refused" not in rank, rank
        assert rank["entries"] > 10
        assert (rank["unequal"], rank["others"]) == ([], [])


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
