"""Full-size checkpoints as sparse files: inspected and planned in seconds; unknown architectures are refused."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints.giant import make_giant, write_sparse
from tests.tools.cli import RunCli

GB = 10**9
EXPECTED = {
    "deepseek-v3": ("deepseek_v3", 91_991, 688_574_839_360, 61, 256),
    "qwen3-235b": ("qwen3_moe", 36_945, 470_187_269_120, 94, 128),
}
"""Name -> family, stored tensors, payload bytes, layers of the forward pass, experts."""
SECONDS = 60
"""Far above what planning takes on two busy cores, far below what a quadratic step would take."""


@pytest.fixture(scope="module", params=EXPECTED)
def giant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("giant") / request.param
    make_giant(request.param, folder)
    yield folder
    shutil.rmtree(folder)  # a backup or a copy that fills holes would write hundreds of gigabytes


def test_inspect_counts_everything(giant: Path, run_cli: RunCli) -> None:
    family, tensors, size, layers, experts = EXPECTED[giant.name]
    found = run_cli("inspect", giant, "--json").json
    assert found["kind"] == "checkpoint"
    assert found["family"] == family
    assert (found["tensors"], found["bytes"]) == (tensors, size)
    assert found["layers"] == layers
    assert found["experts"] == experts
    assert sum(group["tensors"] for group in found["groups"]) == tensors
    assert sum(group["bytes"] for group in found["groups"]) == size


def test_planned_for_32_cards(giant: Path, run_cli: RunCli, tmp_path: Path) -> None:
    size = EXPECTED[giant.name][2]
    start = time.perf_counter()
    found = run_cli("plan-memory", giant, "--cluster", "4x8:80GB", "-o", tmp_path / "plan.yaml", "--json").json
    assert time.perf_counter() - start < SECONDS
    assert found["fits"] is True
    parallel = found["parallel"]
    assert parallel["world"] == 32 == len(found["ranks"])
    assert parallel["pp"] * parallel["dp"] * parallel["tp"] == 32
    assert [rank["rank"] for rank in found["ranks"]] == list(range(32))
    parts = ("weights", "kv_cache", "activations", "communication", "runtime")
    for rank in found["ranks"]:
        assert rank["total"] == sum(rank[part] for part in parts)
        assert rank["total"] <= rank["capacity"] == 80 * GB
    # What is replicated adds to the checkpoint's bytes, so all ranks together hold at least all of it.
    assert sum(rank["weights"] for rank in found["ranks"]) >= size
    assert (tmp_path / "plan.yaml").stat().st_size < 1_000_000


def test_what_does_not_fit_is_marked(giant: Path, run_cli: RunCli, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    found = run_cli("plan-memory", giant, "--cluster", "1x8:24GB", "-o", plan, "--json", code=1).json
    assert found["fits"] is False
    assert any(rank["total"] > rank["capacity"] for rank in found["ranks"])
    assert plan.exists()


def test_dropping_mtp_saves_its_layer(run_cli: RunCli, tmp_path: Path) -> None:
    folder = tmp_path / "deepseek-v3"
    make_giant("deepseek-v3", folder)
    sizes = ("--cluster", "4x8:80GB", "--tp", 8, "--pp", 4, "--ep", 8, "--etp", 1, "--json")
    kept, dropped = (run_cli("plan-memory", folder, *sizes, "--mtp", mtp).json for mtp in ("keep", "drop"))
    saved = sum(a["weights"] - b["weights"] for a, b in zip(kept["ranks"], dropped["ranks"], strict=True))
    assert saved > 10 * GB  # 256 experts of 3 x 7168 x 2048 bytes and an embedding
    shutil.rmtree(folder)


def test_an_unknown_architecture_is_refused(run_cli: RunCli, tmp_path: Path) -> None:
    folder = tmp_path / "unknown"
    folder.mkdir()
    text = {"model_type": "kimi_linear", "num_hidden_layers": 1, "hidden_size": 8, "vocab_size": 16}
    config = {"model_type": "nobody_knows", "architectures": ["NobodyKnowsForCausalLM"], "text_config": text}
    (folder / "config.json").write_text(json.dumps(config))
    write_sparse(folder / "model.safetensors", [("language_model.model.embed_tokens.weight", "BF16", [16, 8])])
    plan = tmp_path / "plan.yaml"
    ran = run_cli("plan-memory", folder, "--cluster", "4x8:80GB", "-o", plan, code=2)
    assert "nobody_knows" in ran.stderr
    for known in ("llama", "qwen2", "qwen3", "mixtral", "qwen3_moe", "deepseek_v3"):
        assert known in ran.stderr
    assert not plan.exists()
