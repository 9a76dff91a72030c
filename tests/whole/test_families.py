"""Every family under every plan: what the shards compute is what transformers computes, and they hold every byte."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from torch import Tensor

from converter.verbs import check, restore
from runtime.request import RunOptions
from runtime.run import verify_and_run
from tests.checkpoints.variants import EDGES, MAIN, VARIANTS
from tests.conftest import MakeCheckpoint
from tests.converter.test_architectures import PLANS, QUICK, REFUSED
from tests.tools.plans import DENSE_PLANS, MOE_PLANS, plan_id
from tests.tools.sharded import Computed, convert_tiny, expected, expected_routes, relative, run_output

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

RUN = (
    "glm4_moe", "gpt_oss", "gpt_oss_mxfp4", "minimax_m2", "deepseek_v2", "ernie4_5_moe", "qwen3_next", "kimi_linear",
    "llama4_text", "kimi_k25", "kimi_k25_int4", "qwen3_vl_moe", "deepseek_v32", "glm_moe_dsa", "minimax_m3_vl",
    "deepseek_v4", "deepseek_v4_fp4", "qwen3_5_moe",
)  # fmt: skip
STEPS = ("gpt_oss", "qwen3_next", "llama4_text", "glm_moe_dsa", "minimax_m3_vl", "deepseek_v4")
"""Those whose caches keep something that the others' don't."""
INSTEAD: Mapping[str, tuple[dict[str, int], ...]] = {
    "gpt_oss_mxfp4": (
        {"tp": 4, "ep": 4}, {"pp": 2, "tp": 2, "ep": 2}, {"dp": 3, "etp": 3}, {"tp": 2, "pp": 3, "ep": 2}
    ),
    "deepseek_v4": ({"dp": 4, "ep": 2, "etp": 2}, {"dp": 2, "pp": 3, "ep": 2}),
    "deepseek_v4_fp4": ({"dp": 4, "ep": 2, "etp": 2}, {"dp": 2, "pp": 3, "ep": 2}),
}  # fmt: skip
"""Where a family can't be cut by some of the eight plans: as many others."""
ARCHITECTURE_CELLS = [
    pytest.param(name, plan, id=f"{name} {plan_id(plan)}", marks=[] if quick else pytest.mark.slow)
    for name in RUN
    for plan, quick in [
        *((plan, number in QUICK) for number, plan in enumerate(PLANS) if (name, number) not in REFUSED),
        *((plan, False) for plan in INSTEAD.get(name, ())),
    ]
]


def name_cell(value: object) -> str:
    return plan_id(value) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize(("name", "sizes"), CELLS + EDGE_CELLS, ids=name_cell)
def test_logits_routes_and_bytes(name: str, sizes: dict[str, int], tiny: MakeCheckpoint, tmp_path: Path) -> None:
    source, out, back = tiny(name), tmp_path / "out", tmp_path / "back"
    convert_tiny(source, out, sizes)

    reference = expected(source)
    assert_computed(run_output(out, reference["input_ids"][0]), reference)
    assert bool(expected_routes(reference)) == (VARIANTS[name].module not in ("llama", "qwen2", "qwen3"))

    found = check(out, deep=source)
    assert found.passed, found.failures
    restore(out, back)
    assert_restored(source, back)


def assert_computed(computed: Computed, reference: Mapping[str, Tensor]) -> None:
    """Every rank's logits, hidden states and routes are the reference's."""
    for scores in computed.logits:
        assert relative(scores, reference["logits"][0]) < LIMIT
    routes, routed, layers = expected_routes(reference), set(), set()
    for watch in computed.watches:
        for layer, hidden in watch.hidden.items():
            if f"hidden.{layer + 2}" in reference:  # transformers norms what comes out of the last layer
                assert relative(hidden, reference[f"hidden.{layer + 1}"][0]) < LIMIT, f"layer {layer}"
            layers.add(layer)
        for layer, chosen in watch.routes.items():
            assert chosen.sort(dim=-1).values.equal(routes[layer]), f"layer {layer}"
            routed.add(layer)
    assert routed == set(routes)
    assert f"hidden.{len(layers)}" in reference and f"hidden.{len(layers) + 1}" not in reference


def test_every_family_has_eight_plans() -> None:
    plans = [*CELLS, *(cell.values for cell in ARCHITECTURE_CELLS)]
    for name in (*MAIN, *RUN):
        mine = [plan for other, plan in plans if other == name]
        assert len(mine) >= 8 and all(mine.count(plan) == 1 for plan in mine), name


@pytest.mark.parametrize(("name", "plan"), ARCHITECTURE_CELLS)
def test_an_architecture_computes_what_transformers_does(
    name: str, plan: dict[str, int], tiny: MakeCheckpoint, tmp_path: Path
) -> None:
    source, out = tiny(name), tmp_path / "out"
    convert_tiny(source, out, plan)
    reference = expected(source)
    assert_computed(run_output(out, reference["input_ids"][0]), reference)
    if plan != PLANS[QUICK[0]]:
        found = verify_and_run(RunOptions(out, source, max_new_tokens=2))
        assert found.passed, found.checks


@pytest.mark.parametrize("name", [n if n in STEPS else pytest.param(n, marks=pytest.mark.slow) for n in RUN])
def test_step_after_step_is_the_same(name: str, tiny: MakeCheckpoint, tmp_path: Path) -> None:
    """Through the cache: a prefill, pieces and single tokens, past windows, chunks and blocks."""
    source, out = tiny(name), tmp_path / "out"
    convert_tiny(source, out, {"tp": 2, "ep": 2})
    reference = expected(source)
    for scores in run_output(out, reference["input_ids"][0], chunks=[9, 1, 1, 6, 1, 1, 1, 1, 1, 1, 1]).logits:
        assert relative(scores, reference["logits"][0]) < LIMIT


@pytest.mark.parametrize("name", STEPS)
def test_a_prompt_shorter_than_any_window(name: str, tiny: MakeCheckpoint, tmp_path: Path) -> None:
    """Nothing is compressed, and no block is full, before there are tokens enough."""
    source, out = tiny(name), tmp_path / "out"
    convert_tiny(source, out, {"tp": 2})
    reference = expected(source)
    for scores in run_output(out, reference["input_ids"][0][:5], chunks=[2, 1, 1, 1]).logits:
        assert relative(scores, reference["logits"][0][:5]) < LIMIT


def assert_restored(source: Path, back: Path) -> None:
    """Weight files, index and carried files come back byte for byte; nothing else does."""
    for path in sorted(back.iterdir()):
        assert path.read_bytes() == (source / path.name).read_bytes(), path.name
    kept = {path.name for path in source.iterdir()} - {"reference.safetensors", "meta.json"}
    assert {path.name for path in back.iterdir()} == kept
