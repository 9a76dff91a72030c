"""Attention residuals: layer after layer against the plain skeleton, and how errors in them are measured."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from runtime.blocks import stream
from runtime.blocks.cache import LayerCache
from runtime.blocks.forward import embed, logits, run_layer
from runtime.blocks.weights import LayerWeights, Stored
from runtime.blocks.words import check_model
from runtime.checking.compare import layer_error
from runtime.comm.comm import Comm, NoComm
from runtime.comm.virtual import VirtualWorld
from shard_plans.errors import RuntimeFault
from shard_plans.families.model import Model
from shard_plans.placement.grid import make_grid
from tests.tools.kimi import DENSE, EPS, KDA, MLA, MOE, SIZES, layer_plain, make_layer, mix_plain, rms
from tests.tools.oracle import Oracle, context, cut, relative, tokens

KINDS = [
    {**KDA, **DENSE},
    {**KDA, **MOE},
    {**KDA, **MOE},
    {**MLA, **MOE},
    {**KDA, **MOE},
    {**MLA, **MOE},
    {**KDA, **MOE},
]


def layers(res_block: int = 3) -> list[Oracle]:
    return [make_layer(words, index, index, res_block) for index, words in enumerate(KINDS)]


def plain(oracles: list[Oracle], x: Tensor) -> list[tuple[Tensor, list[Tensor]]]:
    """Running sum and bank behind every layer."""
    found, bank = [], list[Tensor]()
    for oracle in oracles:
        x, bank = layer_plain(oracle, x, bank)
        found.append((x, bank))
    return found


def run(oracles: list[Oracle], x: Tensor, tp: int = 1, chunks: list[int] | None = None) -> list[list[Tensor]]:
    """The stream behind every layer, on every rank."""

    def rank(comm: Comm) -> list[Tensor]:
        ctx = context(oracles[0], make_grid(tp=tp, ep=tp), comm, torch.float64)
        caches = [LayerCache() for _ in oracles]
        found: list[list[Tensor]] = [[] for _ in oracles]
        for places in torch.split(torch.arange(len(x)), chunks or [len(x)]):
            y = stream.begin(ctx.model, x[places])
            for number, oracle in enumerate(oracles):
                y, _ = run_layer(ctx, oracle.layer, cut(oracle, ctx), y, caches[number] if chunks else None, places)
                found[number].append(y)
        return [torch.cat(parts) for parts in found]

    return VirtualWorld(tp).run(rank)


@pytest.mark.parametrize("tp", [1, 2])
def test_sum_and_bank_are_those_of_the_plain_skeleton(tp: int) -> None:
    oracles, x = layers(), tokens(18).double()
    expected = plain(oracles, x)
    for streams in run(oracles, x, tp):
        for index, (y, (total, bank)) in enumerate(zip(streams, expected, strict=True)):
            assert y.shape == stream.shape(oracles[0].model, 18, index + 1) == (18, 1 + len(bank), 32)
            assert relative(y, torch.stack([total, *bank], dim=1)) < 1e-12
    assert len(expected[-1][1]) == 3


def test_token_by_token_equals_prefill() -> None:
    oracles, x = layers(), tokens(18).double()
    assert relative(run(oracles, x, chunks=[1] * 18)[0][-1], run(oracles, x)[0][-1]) < 1e-12


@pytest.mark.parametrize("res_block", [1, 2, 4, 100])
def test_other_blocks(res_block: int) -> None:
    oracles, x = layers(res_block), tokens(5).double()
    total, bank = plain(oracles, x)[-1]
    assert relative(run(oracles, x)[0][-1], torch.stack([total, *bank], dim=1)) < 1e-12
    assert relative(run(layers(3), x)[0][-1][:, 0], total) > 1e-2


@pytest.mark.parametrize(("layer", "count"), [(0, 1), (1, 2), (12, 2), (13, 3), (46, 5), (84, 8), (85, 9), (93, 9)])
def test_what_a_stage_border_carries(layer: int, count: int) -> None:
    model = make_layer({**KDA, **DENSE}, res_block=12).model
    assert stream.vectors(model, layer) == count
    assert stream.shape(model, 7, layer) == (7, count, 32)
    plain_model = replace(model, words={**model.words, "stream": "plain"})
    assert stream.vectors(plain_model, layer) is None
    assert stream.shape(plain_model, 7, layer) == (7, 32)


def test_the_first_layers_mixture_is_not_used_but_must_be_there() -> None:
    oracle, x = layers()[0], tokens(4).double()[:, None]
    ctx = context(oracle, make_grid(), NoComm(), torch.float64)
    weights = dict(cut(oracle, ctx))

    def out(**changes: Stored) -> Tensor:
        given: LayerWeights = {**weights, **{name.replace("_res", ".res"): value for name, value in changes.items()}}
        return run_layer(ctx, oracle.layer, given, x, None, torch.arange(4))[0]

    assert torch.equal(out(attn_res_proj=Stored(torch.ones(1, 32))), out())
    assert relative(out(ffn_res_proj=Stored(torch.ones(1, 32))), out()) > 1e-3
    del weights["attn.res_norm"]
    with pytest.raises(RuntimeFault, match=r"layer 0: the weight attn\.res_norm is missing"):
        out()


def test_both_ends() -> None:
    oracle, x = layers()[0], tokens(6).double()
    ctx = context(oracle, make_grid(), NoComm(), torch.float64)
    draw = torch.Generator().manual_seed(3)
    norm, proj, last, head = (torch.randn(s, 32, generator=draw, dtype=torch.float64) for s in (1, 1, 1, 64))
    weights = {"out.res_norm": norm[0], "out.res_proj": proj, "norm": last[0], "head": head}
    bank = [tokens(6, seed=seed).double() for seed in (1, 2)]
    stored = {name: Stored(tensor) for name, tensor in weights.items()}
    expected = rms(mix_plain(norm[0], proj, bank, x), last[0]) @ head.T
    assert relative(logits(ctx, stored, torch.stack([x, *bank], dim=1)), expected) < 1e-13
    ids, table = torch.tensor([5, 0, 63]), tokens(64, seed=9)
    assert torch.equal(embed(ctx, {"embed": Stored(table)}, ids), table.double()[ids][:, None])
    pixels = tokens(2, seed=4)
    seen = embed(ctx, {"embed": Stored(table)}, ids, (torch.tensor([2, 0]), pixels))
    assert torch.equal(seen[:, 0], torch.stack([pixels[1], table[0], pixels[0]]).double())


def test_an_error_is_measured_against_what_the_layer_added() -> None:
    oracles, x = layers(), tokens(6).double()
    streams = [stream.begin(oracles[0].model, x), *run(oracles, x)[0]]
    for index, (start, out) in enumerate(pairwise(streams)):
        base = stream.carry(oracles[0].model, oracles[index].layer, start)
        added = (out - base)[:, 0].norm(dim=-1)
        assert torch.equal(base[:, 1:], out[:, 1:])
        assert torch.equal(base[:, 0], torch.zeros(6, 32) if index % 3 == 0 else start[:, 0])
        for vector in range(out.shape[1]):  # in the sum or in the bank: an error of a thousandth of it is seen as such
            wrong = out.clone()
            wrong[4, vector, 7] += 1e-3 * added[4]
            error, token = layer_error(base, wrong, out)
            assert token == 4 and error == pytest.approx(1e-3)


@pytest.mark.parametrize("res_block", [None, 0, 2.5, True])
def test_a_block_must_be_a_number_of_layers(res_block: object) -> None:
    model: Model = make_layer({**KDA, **DENSE}).model
    check_model(model)
    with pytest.raises(RuntimeFault, match="res_block"):
        check_model(replace(model, words={**model.words, "res_block": res_block}))


def test_scores_use_the_models_eps() -> None:
    """Where the vectors are small, eps decides; 1e-6 instead of 1e-5 is seen."""
    oracle, x = layers()[1], 1e-3 * tokens(4).double()
    ctx = context(oracle, make_grid(), NoComm(), torch.float64)
    both = torch.stack([x, 3 * x.flip(0)], dim=1)
    norm, proj = oracle.whole["ffn.res_norm"], oracle.whole["ffn.res_proj"]
    found = stream.seen(ctx, cut(oracle, ctx), "ffn", both)
    assert relative(found, mix_plain(norm, proj, [both[:, 1]], both[:, 0])) < 1e-13
    other = replace(ctx, model=replace(ctx.model, words={**ctx.model.words, "eps": EPS / 10}))
    assert relative(stream.seen(other, cut(oracle, ctx), "ffn", both), found) > 1e-3
    assert SIZES["hidden"] == found.shape[1]
