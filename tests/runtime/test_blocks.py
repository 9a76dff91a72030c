"""Dense layers, attention and the ends of the model, on one rank and several, against transformers' modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.blocks.forward import embed, logits, run_layer
from runtime.blocks.weights import LayerWeights, Stored
from runtime.blocks.words import check_model
from runtime.comm.comm import Comm, NoComm
from runtime.comm.virtual import VirtualWorld
from shard_plans.errors import RuntimeFault
from shard_plans.placement.grid import Grid, make_grid
from tests.tools.oracle import MLA, Oracle, context, cut, make, relative, tokens

DENSE = ("llama", "llama_bias", "qwen2", "qwen2_window", "qwen3", "glm4", "v3_dense", "v3_direct")
LIMIT = 2e-6


def run(oracle: Oracle, grid: Grid, x: Tensor, fuse: bool = True, compute: torch.dtype = torch.float32) -> list[Tensor]:
    """The layer's output on every rank."""

    def rank(comm: Comm) -> Tensor:
        ctx = context(oracle, grid, comm, compute)
        y, _ = run_layer(ctx, oracle.layer, cut(oracle, ctx, fuse), x.to(compute), None, torch.arange(x.shape[0]))
        return y

    return VirtualWorld(grid.world).run(rank)


def added_error(oracle: Oracle, outputs: list[Tensor], x: Tensor) -> float:
    """Worst relative error over ranks of what the layer added to x."""
    reference = oracle.forward(x) - x
    return max(relative(y - x, reference) for y in outputs)


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_dense_layer_equals_transformers(name: str, tp: int) -> None:
    oracle, x = make(name), tokens(20)
    assert added_error(oracle, run(oracle, make_grid(tp=tp), x), x) < LIMIT


@pytest.mark.parametrize("name", ["qwen2", "v3_dense"])
def test_unfused_weights_give_the_same(name: str) -> None:
    oracle, x = make(name), tokens(9)
    assert added_error(oracle, run(oracle, make_grid(tp=2), x, fuse=False), x) < LIMIT


def test_eight_ranks_repeat_two_kv_heads_four_times() -> None:
    oracle, x = make("qwen3"), tokens(11)
    assert added_error(oracle, run(oracle, make_grid(tp=8), x), x) < LIMIT


@pytest.mark.parametrize("name", ["llama", "v3_dense"])
def test_other_compute_types(name: str) -> None:
    oracle, x = make(name), tokens(12)
    doubles = run(oracle, make_grid(tp=2), x, compute=torch.float64)
    assert all(y.dtype == torch.float64 for y in doubles)
    assert added_error(oracle, doubles, x) < LIMIT
    halves = run(oracle, make_grid(tp=2), x, compute=torch.bfloat16)
    assert all(y.dtype == torch.bfloat16 for y in halves)
    assert 1e-4 < max(relative(y, oracle.forward(x)) for y in halves) < 0.02


def test_long_attention_is_computed_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    oracle, x = make("qwen2_window"), tokens(30)
    monkeypatch.setattr("runtime.blocks.attention.SCORES_AT_ONCE", 8 * 30 * 7)
    assert added_error(oracle, run(oracle, make_grid(), x), x) < LIMIT


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "rope style": ("llama", {"rope": "interleaved"}),
    "rope style of the latent": ("v3_dense", {"rope": "half"}),
    "part of the head": ("glm4", {"rope_part": 1.0}),
    "softmax scale": ("v3_dense", {"softmax_scale": None}),
    "window": ("qwen2_window", {"window": 6}),
    "no window": ("qwen2_window", {"window": None}),
    "latent eps": ("v3_dense", {"latent_eps": 1e-3}),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_word_is_seen(what: str) -> None:
    name, words = WRONG[what]
    oracle, x = make(name), tokens(20)
    wrong = replace(oracle, layer=replace(oracle.layer, words={**oracle.layer.words, **words}))
    limit = 1e-4 if what == "latent eps" else 1e-3
    assert added_error(oracle, run(wrong, make_grid(tp=2), x), x) > limit


def swapped(oracle: Oracle, one: str, other: str) -> Oracle:
    whole = oracle.whole
    return replace(oracle, whole={**whole, one: whole[other], other: whole[one]})


@pytest.mark.parametrize("pair", [("mlp.gate", "mlp.up"), ("attn.k", "attn.v"), ("attn.q_norm", "attn.k_norm")])
def test_swapped_weights_are_seen(pair: tuple[str, str]) -> None:
    oracle, x = make("qwen3"), tokens(10)
    assert added_error(oracle, run(swapped(oracle, *pair), make_grid(tp=2), x), x) > 1e-3


def test_the_output_bias_is_added_once() -> None:
    oracle, x = make("llama_bias"), tokens(10)
    doubled = replace(oracle, whole={**oracle.whole, "attn.o.bias": 2 * oracle.whole["attn.o.bias"]})
    assert added_error(oracle, run(doubled, make_grid(tp=2), x), x) > 1e-3


Spoil = Callable[[dict[str, Any]], None]
SPOILED: dict[str, tuple[Spoil, str]] = {
    "extra": (lambda w: w.update({"attn.sinks": Stored(torch.ones(8))}), r"layer 0: no block reads attn.sinks"),
    "missing": (lambda w: w.pop("attn.o") and None, r"layer 0: the weight attn.o is missing"),
    "rows": (lambda w: w.update({"attn.qkv": Stored(torch.ones(8, 32))}), r"attn.qkv has 8 rows.*96 \+ 24 \+ 24"),
    "columns": (lambda w: w.update({"mlp.down": Stored(torch.ones(32, 5))}), r"mlp.down is \[32, 5\].*width 48"),
}


@pytest.mark.parametrize("what", SPOILED)
def test_weights_that_do_not_fit_the_blocks_are_refused(what: str) -> None:
    oracle = make("llama")
    spoil, message = SPOILED[what]
    ctx = context(oracle, make_grid(), NoComm())
    weights = dict(cut(oracle, ctx))
    spoil(weights)
    with pytest.raises(RuntimeFault, match=message):
        run_layer(ctx, oracle.layer, weights, tokens(3), None, torch.arange(3))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"attn": "ssm"}, "layer 0: no block for attn: ssm; the runtime has gqa, mla, kda, gdn, compressed"),
        ({"sinks": 1}, "no block for sinks: 1; the runtime has true"),
        ({"score": "hash_of_id"}, "no block for score: hash_of_id"),
        ({"renormalize": "clamp"}, "gives no renormalize_min"),
        ({"act": "gpt_oss"}, "gives no alpha"),
        ({"router_bias": 1}, "no block for router_bias: 1; the runtime has true, false, logits"),
        ({"window": "wide"}, "window is 'wide', a number is needed"),
        ({"act": None}, "gives no act"),
        ({"groups": 4}, "groups but no group_score"),
        ({"attn": "mla"}, "gives no latent_eps"),
    ],
)
def test_an_unknown_word_is_refused_by_name(words: dict[str, Any], message: str) -> None:
    oracle = make("llama")
    layer = replace(oracle.layer, words={**oracle.layer.words, **words})
    with pytest.raises(RuntimeFault, match=message):
        check_model(replace(oracle.model, layers=(layer,)))


def test_the_models_own_words_are_checked() -> None:
    model = make("llama").model
    check_model(model)
    with pytest.raises(RuntimeFault, match="no block for norm: layernorm"):
        check_model(replace(model, words={**model.words, "norm": "layernorm"}))


def test_heads_that_do_not_divide_are_refused() -> None:
    oracle = make("llama")
    with pytest.raises(RuntimeFault, match="heads 8 can't be dealt to tp 3"):
        run(oracle, Grid(tp=3), tokens(2))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 3])
def test_embedding_and_head_are_cut_by_vocabulary(tp: int, tied: bool) -> None:
    oracle, grid, rows = make("llama"), make_grid(tp=tp), 128 if tp < 3 else 192
    table, head, norm = tokens(100, seed=1), tokens(100, seed=2), 1 + 0.2 * tokens(1, seed=3)[0]
    ids = torch.tensor([0, 99, 41, 63, 64, 50, 49])
    oracle = replace(oracle, model=replace(oracle.model, tied=tied))

    def part(whole: Tensor, rank: int) -> Stored:
        return Stored(torch.cat([whole, torch.zeros(rows - 100, 32)]).chunk(tp)[rank])

    def rank(comm: Comm) -> tuple[Tensor, Tensor]:
        ctx = context(oracle, grid, comm)
        weights: LayerWeights = {"embed": part(table, comm.rank), "norm": Stored(norm)}
        x = embed(ctx, weights, ids)
        last = weights if tied else {"head": part(head, comm.rank), "norm": Stored(norm)}
        return x, logits(ctx, last, x)

    x = table[ids]
    normed = norm * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + oracle.model.words["eps"]))
    expected = normed @ (table if tied else head).T
    for x_rank, logits_rank in VirtualWorld(tp).run(rank):
        assert torch.equal(x_rank, x)
        assert logits_rank.shape == (7, 100)
        assert relative(logits_rank, expected) < LIMIT


def test_the_head_is_converted_in_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = context(make("llama"), make_grid(), NoComm())
    weights = {"head": Stored(tokens(100).bfloat16()), "norm": Stored(torch.ones(32))}
    whole = logits(ctx, weights, tokens(3, seed=1))
    monkeypatch.setattr("runtime.blocks.vocabulary.HEAD_ROWS", 7)
    assert relative(logits(ctx, weights, tokens(3, seed=1)), whole) < LIMIT


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.tensor([3, 100]), "run from 3 to 100, the vocabulary is 0 to 99"),
        (torch.tensor([-1]), "run from -1"),
        (torch.tensor([[1]]), r"must be whole numbers \[tokens\]"),
        (torch.tensor([0.5]), "whole numbers"),
    ],
)
def test_bad_token_ids_are_refused(ids: Tensor, message: str) -> None:
    ctx = context(make("llama"), make_grid(), NoComm())
    with pytest.raises(RuntimeFault, match=message):
        embed(ctx, {"embed": Stored(tokens(100))}, ids)


def test_a_table_with_lost_rows_is_refused() -> None:
    ctx = context(make("llama"), make_grid(), NoComm())
    with pytest.raises(RuntimeFault, match="head has 99 rows"):
        logits(ctx, {"head": Stored(tokens(99)), "norm": Stored(torch.ones(32))}, tokens(2))


def test_a_missing_size_is_named() -> None:
    oracle = make("v3_dense")
    sizes = {name: size for name, size in oracle.model.sizes.items() if name != "kv_lora"}
    with pytest.raises(RuntimeFault, match="gives no size kv_lora"):
        run(replace(oracle, model=replace(oracle.model, sizes=sizes)), make_grid(), tokens(2))


def test_an_untold_partial_rope_is_refused() -> None:
    oracle = make("glm4")
    words = {word: value for word, value in oracle.layer.words.items() if word != "rope_part"}
    with pytest.raises(RuntimeFault, match=r"partial_rotary_factor 0\.5"):
        run(replace(oracle, layer=replace(oracle.layer, words=words)), make_grid(), tokens(2))


def test_latent_norms_ignore_the_models_eps() -> None:
    assert MLA["rms_norm_eps"] != make("v3_dense").layer.words["latent_eps"]


def test_an_infinite_row_of_another_rank_does_not_spread() -> None:
    """A token's row lies on one rank; the row that stands in for it elsewhere must not matter, whatever it holds."""
    oracle = make("llama")
    sizes = {**oracle.model.sizes, "vocab": 8, "hidden": 4}
    oracle = replace(oracle, model=replace(oracle.model, sizes=sizes))
    table = torch.randn(8, 4)
    table[4] = torch.inf  # rank 1's first row, which stands in for each token that lies on rank 0
    ids = torch.tensor([1, 7])

    def rank(comm: Comm) -> Tensor:
        ctx = context(oracle, make_grid(tp=2), comm)
        return embed(ctx, {"embed": Stored(table[comm.rank * 4 : comm.rank * 4 + 4], None, None, None)}, ids)

    for found in VirtualWorld(2).run(rank):
        assert torch.equal(found, table[ids])
