"""vLLM itself, on a CPU: its sharded_state loader accepts the folder, and every parameter is what it loads by itself.

Optional: `make test-engines` makes an environment with the engine; without one these tests are skipped.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from converter.verbs import convert
from tests.conftest import MakeCheckpoint
from tests.engines.checkpoints import as_published

PYTHON = Path(os.environ.get("RESHARD_VLLM_PYTHON", ".venv-engines/bin/python"))
"""An interpreter that has vLLM 0.33."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="no environment with vLLM: make test-engines"),
]
LAYOUT = "vllm@0.33"
CELLS: list[tuple[str, dict[str, int]]] = [
    ("llama", {"tp": 2}), ("qwen2", {"pp": 2}), ("qwen3", {"tp": 2, "pp": 2}), ("mixtral", {"tp": 2, "ep": 2}),
    ("qwen3_moe", {"tp": 4}), ("qwen3_moe", {"tp": 2, "ep": 2}), ("deepseek_v2", {"tp": 2}), ("deepseek_v3", {}),
    ("deepseek_v3", {"tp": 2, "ep": 2}), ("glm4_moe", {"tp": 2, "ep": 2}),
]  # fmt: skip


def compared(source: Path, out: Path, sizes: dict[str, int]) -> list[dict[str, Any]]:
    """What each rank of the engine says of the folder."""
    tp, pp, ep = (sizes.get(axis, 1) for axis in ("tp", "pp", "ep"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(__file__).with_name("vllm_compare.py")
    ranks = [
        subprocess.Popen(
            [PYTHON, script, source, out, *map(str, (tp, pp, int(ep > 1), rank, port))],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": ""},
        )
        for rank in range(tp * pp)
    ]  # fmt: skip
    answers = [process.communicate(timeout=900) for process in ranks]
    for process, (_, errors) in zip(ranks, answers, strict=True):
        assert process.returncode == 0, errors[-2000:]
    return [json.loads(printed.splitlines()[-1]) for printed, _ in answers]


@pytest.mark.parametrize(("name", "sizes"), CELLS, ids=str)
def test_every_parameter_is_what_the_engine_loads_by_itself(
    name: str, sizes: dict[str, int], own_tiny: MakeCheckpoint, tmp_path: Path
) -> None:
    source, out = as_published(own_tiny(name)), tmp_path / "out"
    convert(source, out, layout=LAYOUT, **sizes)  # type: ignore[arg-type]
    for rank in compared(source, out, sizes):
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
    assert all(len(rank["unequal"]) > 3 for rank in compared(source, out, {"tp": 2, "ep": 2}))


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
    (rank,) = compared(source, out, {})
    assert "refused" in rank
