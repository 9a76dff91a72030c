"""The gated delta rule in both forms, Kimi Delta Attention and gated latent attention on one rank and several."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.blocks import kda as block
from runtime.blocks.beside import Beside
from runtime.blocks.cache import LayerCache
from runtime.blocks.context import RankContext
from runtime.blocks.convolution import convolve
from runtime.blocks.delta_rule import CHUNK, chunked, recurrent
from runtime.blocks.kda import kda
from runtime.blocks.mla import mla
from runtime.blocks.weights import LayerWeights, Stored
from runtime.blocks.words import check_layer
from runtime.comm.comm import Comm, NoComm
from runtime.comm.virtual import VirtualWorld
from shard_plans.errors import RuntimeFault
from shard_plans.placement.grid import make_grid
from tests.tools.kimi import DENSE, KDA, MLA, SIZES, kda_plain, make_layer, mla_plain
from tests.tools.oracle import Oracle, context, cut, relative, tokens

BLOCKS = {"kda": (KDA, kda, kda_plain), "mla": (MLA, mla, mla_plain)}


def rule_inputs(count: int, least: float, most: float, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v, g, beta and a state for 3 heads of width 8 and values of width 5; g between `least` and `most`."""
    draw = torch.Generator().manual_seed(count)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    q, k, v = normal(3, count, 8), normal(3, count, 8), normal(3, count, 5)
    g = least + (most - least) * torch.rand((3, count, 8), generator=draw, dtype=torch.float64)
    unit = k / k.norm(dim=-1, keepdim=True)
    return [x.to(dtype) for x in (q, unit, v, g, normal(3, count).sigmoid(), normal(3, 8, 5))]


def rule_plain(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The rule as a product of matrices: S <- (I - beta k k^T) diag(exp(g)) S + beta k v^T."""
    out, states = torch.zeros_like(v), []
    for h in range(len(q)):
        s = state[h]
        for t in range(q.shape[1]):
            turn = torch.eye(len(s), dtype=s.dtype) - beta[h, t] * torch.outer(k[h, t], k[h, t])
            s = turn @ torch.diag(g[h, t].exp()) @ s + beta[h, t] * torch.outer(k[h, t], v[h, t])
            out[h, t] = s.T @ q[h, t]
        states.append(s)
    return out, torch.stack(states)


@pytest.mark.parametrize("count", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
@pytest.mark.parametrize("fade", [(-5.0, 0.0), (-5.0, -4.99), (-1e-6, 0.0)])
def test_both_forms_are_the_rule(count: int, fade: tuple[float, float]) -> None:
    given = rule_inputs(count, *fade)
    expected = rule_plain(*given)
    for form in (chunked, recurrent):
        for ours, theirs in zip(form(*given), expected, strict=True):
            assert relative(ours, theirs) < 1e-13


@pytest.mark.parametrize("fade", [(-5.0, 0.0), (-5.0, -4.99)])
def test_strong_fading_loses_no_digits_in_float32(fade: tuple[float, float]) -> None:
    single = rule_inputs(4 * CHUNK, *fade, dtype=torch.float32)
    expected = rule_plain(*(x.double() for x in single))
    for form in (chunked, recurrent):
        for ours, theirs in zip(form(*single), expected, strict=True):
            assert relative(ours, theirs) < 5e-7


def test_no_tokens_change_nothing() -> None:
    given = rule_inputs(0, -5, 0)
    for form in (chunked, recurrent):
        out, state = form(*given)
        assert out.shape == (3, 0, 5) and torch.equal(state, given[-1])


def test_the_convolution_is_causal_and_its_last_tap_is_now() -> None:
    x, taps = tokens(12, 5).double(), tokens(5, 4, seed=1).double()
    padded = torch.cat([torch.zeros(3, 5, dtype=x.dtype), x])
    theirs = torch.nn.functional.conv1d(padded.T[None], taps[:, None], groups=5)[0].T
    assert relative(convolve(padded, taps), torch.nn.functional.silu(theirs)) < 1e-14
    now = torch.zeros(5, 4, dtype=x.dtype)
    now[:, 3] = 1
    assert torch.equal(convolve(padded, now), torch.nn.functional.silu(x))


def run(name: str, tp: int, x: Tensor, chunks: list[int], compute: torch.dtype = torch.float64) -> list[Any]:
    """The block's output on every rank, x given in chunks; and the rank's cache."""
    words, attention, _ = BLOCKS[name]
    oracle = make_layer({**words, **DENSE})

    def rank(comm: Comm) -> tuple[Tensor, LayerCache]:
        ctx = context(oracle, make_grid(tp=tp), comm, compute)
        cache, weights = LayerCache(), cut(oracle, ctx)
        places = torch.split(torch.arange(len(x)), chunks)
        outputs = [attention(ctx, oracle.layer, weights, x[p].to(compute), cache, p, Beside()) for p in places]
        return torch.cat(outputs), cache

    return VirtualWorld(tp).run(rank)


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("tp", [1, 2, 3, 6])
def test_attention_equals_the_plain_one(name: str, tp: int) -> None:
    words, _, plain = BLOCKS[name]
    x = tokens(CHUNK + 4).double()
    expected = plain(make_layer({**words, **DENSE}).whole, x)
    for y, _ in run(name, tp, x, [len(x)]):
        assert relative(y, expected) < 1e-13


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("chunks", [[1] * 20, [17, 1, 1, 1], [3, 16, 1]])
def test_token_by_token_equals_prefill(name: str, chunks: list[int]) -> None:
    x = tokens(20).double()
    (whole, _), *_ = run(name, 2, x, [20])
    (steps, cache), *_ = run(name, 2, x, chunks)
    assert relative(steps, whole) < 1e-13
    assert cache.length == 20


def test_float32_and_bfloat16() -> None:
    x = tokens(20)
    expected = kda_plain(make_layer({**KDA, **DENSE}).whole, x.double())
    assert relative(run("kda", 2, x, [20], torch.float32)[0][0], expected) < 2e-6
    (low, cache), *_ = run("kda", 2, x, [20], torch.bfloat16)
    assert low.dtype == torch.bfloat16 and 1e-4 < relative(low, expected) < 0.03
    tail, state = cache.recall()
    assert (tail.dtype, state.dtype) == (torch.bfloat16, torch.float32)


def test_the_state_does_not_grow() -> None:
    sizes = []
    for count in (1, 40):
        (_, cache), *_ = run("kda", 3, tokens(count), [count], torch.float32)
        heads, width = SIZES["kda_heads"] // 3, SIZES["kda_dim"]
        assert [tuple(part.shape) for part in cache.recall()] == [(3, 3 * heads * width), (heads, width, width)]
        sizes.append(cache.nbytes)
    assert sizes == [4 * (3 * 3 * 14 + 2 * 49)] * 2


def alone(tp: int = 1) -> tuple[Oracle, RankContext, dict[str, Any]]:
    oracle = make_layer({**KDA, **DENSE})
    ctx = context(oracle, make_grid(tp=tp), NoComm(), torch.float64)
    return oracle, ctx, dict(cut(oracle, ctx))


def test_a_state_goes_on_where_it_stands() -> None:
    oracle, ctx, weights = alone()
    cache, x = LayerCache(), tokens(9).double()
    kda(ctx, oracle.layer, weights, x[:5], cache, torch.arange(5), Beside())
    with pytest.raises(RuntimeFault, match=r"goes on at position 5, was given the 4 positions \[6, 7, 8\]"):
        kda(ctx, oracle.layer, weights, x[5:], cache, torch.arange(6, 10), Beside())
    with pytest.raises(RuntimeFault, match="one cache for each layer"):
        cache.append(torch.arange(5, 6), [torch.zeros(1, 4)])
    cache.free()
    again = kda(ctx, oracle.layer, weights, x, cache, torch.arange(9), Beside())
    assert torch.equal(again, kda(ctx, oracle.layer, weights, x, None, torch.arange(9), Beside()))
    keys = LayerCache()
    keys.append(torch.arange(2), [torch.zeros(2, 4)])
    with pytest.raises(RuntimeFault, match=r"keeps keys, was given a state of \[\(3,\)\]"):
        keys.replace(torch.arange(2, 3), [torch.zeros(2, 3)])


Spoil = Callable[[dict[str, Any]], object]
SPOILED: dict[str, tuple[Spoil, str]] = {
    "A_log with its tail": (lambda w: w.update({"kda.A_log": Stored(torch.zeros(8))}), r"kda.A_log is \[8\].*\[6\]"),
    "a bias a head": (lambda w: w.update({"kda.dt_bias": Stored(torch.zeros(6))}), r"kda.dt_bias is \[6\].*\[42\]"),
    "another rank's rows": (lambda w: w.update({"kda.k": Stored(torch.ones(35, 32))}), r"kda.k .*\[20, 35\].*42\]"),
    "too many taps": (lambda w: w.update({"kda.q_conv": Stored(torch.ones(42, 1, 5))}), r"kda.q_conv.*\[42, 1, 4\]"),
    "a gate of other heads": (lambda w: w.update({"attn.gate": Stored(torch.ones(40, 32))}), r"attn.gate .*\[20, 42\]"),
    "no gate": (lambda w: w.pop("attn.gate"), "the weight attn.gate is missing"),
}  # fmt: skip


@pytest.mark.parametrize("what", SPOILED)
def test_weights_that_do_not_fit_are_refused(what: str) -> None:
    oracle, ctx, weights = alone()
    spoil, message = SPOILED[what]
    spoil(weights)
    with pytest.raises(RuntimeFault, match=message):
        kda(ctx, oracle.layer, weights, tokens(20).double(), None, torch.arange(20), Beside())


def clamped(ctx: RankContext, words: Mapping[str, Any], weights: LayerWeights, x: Tensor) -> Tensor:
    """The other reading of the bound: a softplus, cut off."""
    gate = forget(ctx, words, weights, x) / words["decay_bound"]
    raw = torch.log(gate / (1 - gate))
    rate = weights["kda.A_log"]
    assert isinstance(rate, Stored)
    scale = rate.values.exp()[:, None]
    return (-scale * torch.nn.functional.softplus(raw / scale)).clamp_min(words["decay_bound"])


forget = block.forget
WRONG: dict[str, Mapping[str, Any]] = {
    "bound": {"decay_bound": -4.0}, "no gate": {"output_gate": None}, "latent eps": {"latent_eps": 1e-3},
}  # fmt: skip


def test_a_clamp_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    x = tokens(20).double()
    expected = kda_plain(make_layer({**KDA, **DENSE}).whole, x)
    monkeypatch.setattr(block, "forget", clamped)
    assert relative(run("kda", 2, x, [20])[0][0], expected) > 1e-2


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_word_is_seen(what: str) -> None:
    words, attention, plain = BLOCKS["kda" if what == "bound" else "mla"]
    oracle, x = make_layer({**words, **DENSE}), tokens(20).double()
    layer = replace(oracle.layer, words={**oracle.layer.words, **WRONG[what]})
    ctx = context(oracle, make_grid(), NoComm(), torch.float64)
    y = attention(ctx, layer, cut(oracle, ctx), x, None, torch.arange(20), Beside())
    assert relative(y, plain(oracle.whole, x)) > 1e-4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"decay": "linear"}, "no block for decay: linear; the runtime has sigmoid, softplus"),
        ({"decay_bound": None}, "gives no decay_bound"),
        ({"gate": "none"}, "no block for gate: none; the runtime has full_rank, low_rank"),
        ({"beta": None}, "gives no beta"),
        ({"linear_beta": True}, "linear_beta is True, a number is needed"),
        ({"attn": "mla", "latent_eps": 1e-6}, "gives no rope"),
    ],
)
def test_words_that_are_missing_or_unknown_are_named(words: Mapping[str, Any], message: str) -> None:
    oracle = make_layer({**KDA, **DENSE})
    check_layer(oracle.model, oracle.layer)
    with pytest.raises(RuntimeFault, match=message):
        check_layer(oracle.model, replace(oracle.layer, words={**oracle.layer.words, **words}))
