"""vLLM itself, on a CPU: its sharded_state loader accepts the folder, and every parameter is what it loads by itself.

Optional: `make test-engines` makes an environment with the engine; without one these tests are skipped.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from converter.verbs import convert
from tests.conftest import MakeCheckpoint
from tests.engines.checkpoints import as_published
from tests.engines.engine import NEEDED, compared

pytestmark = NEEDED
LAYOUT = "vllm@0.33"
CELLS: list[tuple[str, dict[str, int]]] = [
    ("llama", {"tp": 2}), ("qwen2", {"pp": 2}), ("qwen3", {"tp": 2, "pp": 2}), ("mixtral", {"tp": 2, "ep": 2}),
    ("qwen3_moe", {"tp": 4}), ("qwen3_moe", {"tp": 2, "ep": 2}), ("deepseek_v2", {"tp": 2}), ("deepseek_v3", {}),
    ("deepseek_v3", {"tp": 2, "ep": 2}), ("glm4_moe", {"tp": 2, "ep": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "sizes"), CELLS, ids=str)
def test_every_parameter_is_what_the_engine_loads_by_itself(
    name: str, sizes: dict[str, int], own_tiny: MakeCheckpoint, tmp_path: Path
) -> None:
    source, out = as_published(own_tiny(name)), tmp_path / "out"
    convert(source, out, layout=LAYOUT, **sizes)  # type: ignore[arg-type]
    for rank in compared(source, out, "sharded_state", sizes):
        assert rank["entries"] > 10
        assert (rank["unequal"], rank["others"]) == ([], [])


def test_exchanged_ranks_are_seen(own_tiny: MakeCheckpoint, tmp_path: Path) -> None:
    """The comparison can fail: the loader itself takes any file of the right shapes."""
    source, out = as_published(own_tiny("qwen3_moe")), tmp_path / "out"
    convert(source, out, layout=LAYOUT, tp=2, ep=2)
    first, second = (out / f"model-rank-{rank}-part-0.safetensors" for rank in (0, 1))
    whole = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(whole)
    assert all(len(rank["unequal"]) > 3 for rank in compared(source, out, "sharded_state", {"tp": 2, "ep": 2}))


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
    (rank,) = compared(source, out, "sharded_state", {})
    assert "refused" in rank
