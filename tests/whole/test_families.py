"""Every family under every plan: what the shards compute is what transformers computes, and they hold every byte."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from converter.verbs import check, restore
from tests.checkpoints.variants import EDGES, MAIN, VARIANTS
from tests.conftest import MakeCheckpoint
from tests.tools.plans import DENSE_PLANS, MOE_PLANS, plan_id
from tests.tools.sharded import convert_tiny, expected, expected_routes, relative, run_output

LIMIT = 1e-5
DENSE = ("llama", "qwen2", "qwen3")
CELLS = [(name, sizes) for name in MAIN for sizes in (DENSE_PLANS if name in DENSE else DENSE_PLANS + MOE_PLANS)]
EDGE_PLANS: Mapping[str, dict[str, int]] = {
    "qwen2_fp8": {"tp": 2},  # KV rows end inside a scale block, so q, k, v stay apart, and their biases with them
    "llama_odd": {"tp": 3, "pp": 3},  # 9 heads, 3 KV heads, a vocabulary of 250
    "mixtral_odd": {"tp": 2, "ep": 2, "etp": 1},  # 5 experts over 2 ranks
    "deepseek_v3_mtp": {"pp": 2, "tp": 2, "ep": 2},
    "deepseek_v3_full_q": {"tp": 4, "ep": 4},
}
EDGE_CELLS = [(name, EDGE_PLANS.get(name, {"tp": 2, "pp": 3})) for name in EDGES]


def name_cell(value: object) -> str:
    return plan_id(value) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize(("name", "sizes"), CELLS + EDGE_CELLS, ids=name_cell)
def test_logits_routes_and_bytes(name: str, sizes: dict[str, int], tiny: MakeCheckpoint, tmp_path: Path) -> None:
    source, out, back = tiny(name), tmp_path / "out", tmp_path / "back"
    convert_tiny(source, out, sizes)

    reference = expected(source)
    computed = run_output(out, reference["input_ids"][0])
    for scores in computed.logits:
        assert relative(scores, reference["logits"][0]) < LIMIT
    routes = expected_routes(reference)
    seen = set()
    for watch in computed.watches:
        for layer, chosen in watch.routes.items():
            assert chosen.sort(dim=-1).values.equal(routes[layer])
            seen.add(layer)
    assert seen == set(routes)
    assert bool(routes) == (VARIANTS[name].module not in ("llama", "qwen2", "qwen3"))

    found = check(out, deep=source)
    assert found.passed, found.failures
    restore(out, back)
    assert_restored(source, back)


def assert_restored(source: Path, back: Path) -> None:
    """Weight files, index and carried files come back byte for byte; nothing else does."""
    for path in sorted(back.iterdir()):
        assert path.read_bytes() == (source / path.name).read_bytes(), path.name
    kept = {path.name for path in source.iterdir()} - {"reference.safetensors", "meta.json"}
    assert {path.name for path in back.iterdir()} == kept
