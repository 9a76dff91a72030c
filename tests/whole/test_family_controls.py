"""What the blocks of an architecture do is seen in its logits: one wrong word, or one wrong line, and they differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.blocks import compressed, compressor, experts, gdn, gqa, hyper, int4, moe, qk_norm, router
from runtime.blocks.context import RankContext
from runtime.comm.comm import NoComm
from shard_plans.errors import RuntimeFault
from shard_plans.families.model import Model
from shard_plans.placement.grid import Grid
from tests.conftest import MakeCheckpoint
from tests.tools.sharded import convert_tiny, expected, relative, run_output

pytestmark = pytest.mark.slow
SEEN = 1e-4
"""Ten times what a right run may differ by."""
PLAN = {"tp": 2, "ep": 2}
WORDS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "rope style": ("deepseek_v2", {"rope": "half"}),
    "best of a group": ("deepseek_v2", {"group_score": "top2_sum"}),
    "shares that sum to one": ("ernie4_5_moe", {"renormalize": False}),
    "interleaved for half": ("ernie4_5_moe", {"rope": "half"}),
    "part of a head": ("minimax_m2", {"rope_part": 1.0}),
    "softmax of all": ("gpt_oss", {"score": "softmax"}),
    "window": ("gpt_oss", {"window": 9}),
    "alpha": ("gpt_oss", {"alpha": 1.0}),
    "limit": ("gpt_oss", {"limit": 1.0}),
    "halves for pairs": ("gpt_oss", {"expert_pairs": None}),
    "weight on the output": ("llama4_text", {"score": "sigmoid"}),
    "no chunks": ("llama4_text", {"chunk": None}),
    "no temperature": ("llama4_text", {"temperature": None}),
    "floor of the temperature": ("llama4_text", {"temperature_floor": 5}),
    "no norm of queries": ("llama4_text", {"qk_norm": None}),
    "pairs for halves": ("qwen3_vl_moe", {"expert_pairs": "interleaved"}),
    "bounded decay": ("kimi_linear", {"decay": "sigmoid", "decay_bound": -5.0}),
    "norms not centred": ("qwen3_next", {"norm": "rms"}),
    "index rope": ("deepseek_v32", {"index_rope": "interleaved"}),
    "the other index rope": ("glm_moe_dsa", {"index_rope": "half"}),
    "one key fewer": ("glm_moe_dsa", {"index_topk": 7}),
    "block of another size": ("minimax_m3_vl", {"index_block": 5}),
    "one block fewer": ("minimax_m3_vl", {"index_topk": 1}),
    "no block of one's own": ("minimax_m3_vl", {"index_local": 0}),
    "one compressed key fewer": ("deepseek_v4", {"index_topk": 1}),
    "rope of the other kind": ("deepseek_v4", {"rope_kind": "main"}),
    "window of one key fewer": ("deepseek_v4", {"window": 7}),
    "one round of sinkhorn": ("deepseek_v4", {"sinkhorn": 1}),
    "plain SwiGLU": ("minimax_m3_vl", {"act": "silu"}),
}


def wrong_words(words: Mapping[str, Any]) -> Callable[[Model], Model]:
    """The model with these words where a layer, or the model, has them, or the layer can."""

    def spoil(model: Model) -> Model:
        added = {"decay_bound", "expert_pairs"}
        layers = tuple(
            replace(layer, words={**layer.words, **{w: v for w, v in words.items() if w in layer.words or w in added}})
            for layer in model.layers
        )
        own = {word: value for word, value in words.items() if word in model.words}
        return replace(model, layers=layers, words={**model.words, **own})

    return spoil


@pytest.fixture
def error(tiny: MakeCheckpoint, tmp_path: Path) -> Callable[..., float]:
    """(name, plan, spoil) -> the relative error of the logits."""

    def run(name: str, plan: dict[str, int], spoil: Callable[[Model], Model] | None = None) -> float:
        source, out = tiny(name), tmp_path / "out"
        if not out.exists():
            convert_tiny(source, out, plan)
        reference = expected(source)
        scores = run_output(out, reference["input_ids"][0], spoil=spoil).logits
        return max(relative(part, reference["logits"][0]) for part in scores)

    return run


@pytest.mark.parametrize("what", WORDS)
def test_a_wrong_word_is_seen(what: str, error: Callable[..., float]) -> None:
    name, words = WORDS[what]
    assert error(name, PLAN, wrong_words(words)) > SEEN


def own_heads(ctx: RankContext, *rest: Any) -> Any:
    """Each rank norms its own heads as if there were no others."""
    sizes = dict(ctx.model.sizes)
    sizes |= {"heads": sizes["heads"] // ctx.grid.tp, "kv_heads": max(1, sizes["kv_heads"] // ctx.grid.tp)}
    alone = replace(ctx, grid=Grid(), at=Grid().coordinate(0), comm=NoComm(), model=replace(ctx.model, sizes=sizes))
    return ALL_HEADS(alone, *rest)


def every_bias(ctx: RankContext, *rest: Any) -> Any:
    """Every etp rank adds the bias of the last product."""
    return PRODUCTS(replace(ctx, at=replace(ctx.at, etp=0)), *rest)


def no_sinks(ctx: RankContext, *rest: Any) -> Tensor | None:
    """The softmax drains nothing."""
    found = SINKS(ctx, *rest)
    return None if found is None else torch.full_like(found, float("-inf"))


def halves(ctx: RankContext, weights: Any, role: str, x: Tensor, keys: int, parts: list[int]) -> list[Tensor]:
    """All queries, all keys, ... one behind the other, not head by head."""
    y = torch.cat(BY_KEY_HEAD(ctx, weights, role, x, 1, [keys * sum(parts)]), dim=-1)
    return list(torch.split(y, [keys * part for part in parts], dim=-1))


def in_turn(x: Tensor, repeats: int, dim: int) -> Tensor:
    """Value heads take key heads in turn."""
    return x.repeat(1, repeats, 1) if dim == 1 else REPEAT(x, repeats, dim)


def other_way(ctx: RankContext, weights: Any, block: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The streams are mixed as if they came in the other order."""
    seen, shares, _ = ENTER(ctx, weights, block, x)
    return seen, shares, ENTER(ctx, weights, block, x.flip(1))[2]


def not_back(ctx: RankContext, weights: Any, y: Tensor) -> Tensor:
    """The last dimensions of every head's output are another's."""
    return OUTPUT(ctx, weights, torch.cat([y[..., :-2], y[..., -2:].flip(-1)], dim=-1))


def own_half(x: Tensor, width: int, nothing: float) -> Tensor:
    """Both halves count in a token's own window."""
    return torch.cat([x[..., :width], x[..., width:]], dim=1)


ENTER, OUTPUT = hyper.enter, compressed.output
ALL_HEADS, PRODUCTS, SINKS, BY_KEY_HEAD = qk_norm._all_heads, experts.products, gqa.sinks, gdn._by_key_head
REPEAT = Tensor.repeat_interleave
LINES: Mapping[str, tuple[str, dict[str, int], Any, str, Any]] = {
    "norm of a rank's own heads": ("minimax_m2", PLAN, qk_norm, "_all_heads", own_heads),
    "bias on every etp rank": ("gpt_oss", {"tp": 4, "ep": 2, "etp": 2}, moe, "products", every_bias),
    "no sinks": ("gpt_oss", PLAN, gqa, "sinks", no_sinks),
    "zero of INT4": ("kimi_k25_int4", PLAN, int4, "ZERO", 7),
    "rows not by key head": ("qwen3_next", {}, gdn, "_by_key_head", halves),
    "another score": ("deepseek_v4", PLAN, router, "SCORES", {**router.SCORES, "sqrtsoftplus": torch.sigmoid}),
    "streams in the other order": ("deepseek_v4", PLAN, hyper, "enter", other_way),
    "output not turned back": ("deepseek_v4", PLAN, compressed, "output", not_back),
    "first half of a token's own window": ("deepseek_v4", PLAN, compressor, "_with_previous", own_half),
    "value heads in turn": ("qwen3_next", {}, Tensor, "repeat_interleave", in_turn),
}


@pytest.mark.parametrize("what", LINES)
def test_a_wrong_line_is_seen(what: str, error: Callable[..., float], monkeypatch: pytest.MonkeyPatch) -> None:
    name, plan, module, attribute, wrong = LINES[what]
    assert error(name, plan) < SEEN / 10
    monkeypatch.setattr(module, attribute, wrong)
    try:
        found = error(name, plan)
    except RuntimeFault:  # shapes that don't fit
        return
    assert found > SEEN
