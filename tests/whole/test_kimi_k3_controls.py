"""Kimi K3 computed as it has been got wrong elsewhere: each error, put into one layer of the ranks, is found there.

The reference stays right. A wrong word or function is given to the sharded ranks alone, and to the one layer.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from runtime import request as verb
from runtime.blocks import experts, ffn, kda, moe
from runtime.blocks.context import RankContext
from runtime.blocks.linear import column_linear
from runtime.blocks.norms import rms_norm
from runtime.blocks.router import Routing, route
from runtime.blocks.weights import LayerWeights, Readings, Stored, dense, take
from runtime.opened import Opened, open_output
from runtime.request import RunOptions
from runtime.result import RunResult
from runtime.run import verify_and_run
from tests.mutations.code import replace_in_layer
from tests.tools import tamper
from tests.tools.kimi import TINY
from tests.tools.sharded import checks, convert_tiny, failed

SIZES = {"tp": 2, "pp": 2}
IDS = torch.randint(0, 500, (17,), generator=torch.Generator().manual_seed(2))
"""In layer 1 the router's bias decides about token 2 by less than bfloat16 can tell."""
ALWAYS, OFTEN = {"layers", "logits"}, {"operators", "hidden", "routing", "decode"}
"""Checks that every error here must fail, and those that some do."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A right output; never written into."""
    out = tmp_path_factory.mktemp("kimi") / "out"
    convert_tiny(TINY, out, SIZES)
    return out


def verify(out: Path) -> RunResult:
    return verify_and_run(RunOptions(out, TINY, input_ids=",".join(map(str, IDS.tolist()))))


def assert_found(result: RunResult, layer: int, *more: str) -> None:
    """The checks that must fail do, and none that can't; the worst layer is the wrong one."""
    must = ALWAYS.union(more)
    assert must <= failed(result) <= must | OFTEN, [(c.name, c.passed, c.where) for c in result.checks]
    assert re.match(rf"layer {layer}, rank \d[,:]", checks(result)["layers"].where), checks(result)["layers"].where


def test_all_is_right_before(whole: Path) -> None:
    assert failed(verify(whole)) == set()


Change = Callable[[Opened], Opened]


def layer_words(index: int, **words: Any) -> Change:
    def change(opened: Opened) -> Opened:
        layers = [
            replace(layer, words={**layer.words, **words}) if layer.index == index else layer
            for layer in opened.model.layers
        ]
        return replace(opened, model=replace(opened.model, layers=tuple(layers)))

    return change


def model_words(**words: Any) -> Change:
    return lambda opened: replace(opened, model=replace(opened.model, words={**opened.model.words, **words}))


WORDS: Mapping[str, tuple[int, Change]] = {
    "gate bound -4": (5, layer_words(5, decay_bound=-4.0)),
    "silu for situ, dense": (0, layer_words(0, act="silu")),
    "silu for situ, experts": (6, layer_words(6, act="silu")),
    "block 11": (11, model_words(res_block=11)),
    "no output gate": (7, layer_words(7, output_gate=None)),
    "situ's beta": (9, layer_words(9, beta=4.1)),
}


@pytest.mark.parametrize("control", WORDS)
def test_a_wrong_word(control: str, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, change = WORDS[control]
    monkeypatch.setattr(verb, "open_output", lambda out: change(open_output(out)))
    if control == "no output gate":  # its weight would be refused as unread
        monkeypatch.setattr(Readings, "refuse_unread", lambda self: None)
    result = verify(whole)
    assert_found(result, layer)
    if control == "block 11":
        assert "3 vectors a token, the reference has 2" in checks(result)["layers"].where


def clamped(ctx: RankContext, words: Mapping[str, Any], weights: LayerWeights, x: Tensor) -> Tensor:
    """The bound as a clamp of Kimi Linear's softplus."""
    raw, rate = forget_parts(ctx, weights, x)
    return (-rate[:, None] * functional.softplus(raw)).clamp_min(words["decay_bound"])


def per_channel(ctx: RankContext, words: Mapping[str, Any], weights: LayerWeights, x: Tensor) -> Tensor:
    """A_log, which is as long as a head is wide, taken for one number a channel, its zeros included."""
    raw, rate = forget_parts(ctx, weights, x)
    rates = functional.pad(rate, (0, raw.shape[-1] - len(rate)), value=1.0)
    bound: float = words["decay_bound"]
    return bound * (rates * raw).sigmoid()


def forget_parts(ctx: RankContext, weights: LayerWeights, x: Tensor) -> tuple[Tensor, Tensor]:
    raw = column_linear(ctx, weights, "kda.f_b", column_linear(ctx, weights, "kda.f_a", x))
    raw = raw + dense(take(weights, "kda.dt_bias"), ctx.compute)
    rate = dense(take(weights, "kda.A_log"), ctx.compute).exp()
    return raw.view(len(x), len(rate), -1), rate


def normed_before(
    ctx: RankContext, words: Mapping[str, Any], weights: LayerWeights, y: Tensor, shares: Tensor
) -> Tensor:
    """The latent norm on every expert's product, before the sum."""
    y = rms_norm(y, dense(take(weights, "moe.latent_norm"), ctx.compute), ctx.model.words["eps"])
    return column_linear(ctx, weights, "moe.latent_up", (shares[..., None] * y).sum(1))


def rounded(
    words: Mapping[str, Any], topk: int, x: Tensor, weight: Tensor, bias: Tensor | None, given: Tensor | None = None
) -> Routing:
    """The router's bias as bfloat16 keeps it."""
    return route(words, topk, x, weight, None if bias is None else bias.bfloat16().to(bias.dtype), given)


def swapped(words: Mapping[str, Any], gate: Tensor, up: Tensor) -> Tensor:
    """w1 and w3 exchanged."""
    return ffn.gated(words, up, gate)


CODE: Mapping[str, tuple[int, Any, str, Any]] = {
    "clamp instead of sigmoid": (5, kda, "forget", clamped),
    "A_log read per channel": (10, kda, "forget", per_channel),
    "norm before the sum": (4, moe, "combine", normed_before),
    "bias in bf16": (1, moe, "route", rounded),
    "w1 and w3 swapped, in the code": (8, experts, "gated", swapped),
}


@pytest.mark.parametrize("control", CODE)
def test_a_wrong_block(control: str, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, module, name, wrong = CODE[control]
    replace_in_layer(monkeypatch, layer, module, name, lambda right, *given: wrong(*given))
    result = verify(whole)
    assert_found(result, layer)
    if control == "bias in bf16":
        assert "routing" in failed(result)
        assert re.match(r"layer 1, rank \d, token 2: experts .* the reference chose", checks(result)["routing"].where)


def test_w1_and_w3_swapped_in_the_files(whole: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    for part in ("", ".scale"):
        (_, _), (file, name) = tamper.find(out, f"layers.8.experts.gate_up{part}")  # the second of etp 2
        tamper.swap_halves(out, file, name)
    result = verify(out)
    assert_found(result, 8, "bytes")
    assert re.search(rf"{file}.*layers\.8\.experts\.gate_up", checks(result)["bytes"].where)


def test_a_bias_that_lost_digits_in_the_files(whole: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    for file, name in tamper.find(out, "layers.1.moe.router_bias"):
        tamper.change(out, file, name, lambda bits: (bits + 0x8000) & 0xFFFF0000)
    result = verify(out)
    assert_found(result, 1, "bytes", "routing")
    assert "layers.1.moe.router_bias" in checks(result)["bytes"].where


def test_what_reading_a_log_per_channel_needs_is_true_of_this_checkpoint() -> None:
    """Were A_log as long as the heads are many, the misreading couldn't happen."""
    from tests.checkpoints.store import read_tensors

    stored = Stored(read_tensors(TINY)["language_model.model.layers.10.self_attn.A_log"])
    assert stored.values.shape == (32,) and not bool(stored.values[6:].any())
