"""LatentMoE and SiTU against a plain loop over tokens and experts, over grids that cut experts and tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.blocks import moe as block
from runtime.blocks.context import RankContext
from runtime.blocks.ffn import gated, swiglu
from runtime.blocks.moe import moe
from runtime.blocks.mxfp4 import decode
from runtime.blocks.norms import rms_norm
from runtime.blocks.weights import LayerWeights, Stored, dense, take
from runtime.comm.comm import Comm
from runtime.comm.virtual import VirtualWorld
from shard_plans.errors import RuntimeFault
from shard_plans.placement.grid import Grid, make_grid
from tests.tools.kimi import DENSE, EPS, KDA, MOE, SITU, make_layer, moe_plain, situ_plain, unit_plain
from tests.tools.oracle import Oracle, context, cut, relative, tokens

GRIDS = {
    "one rank": make_grid(), "tp2": make_grid(tp=2), "tp3": make_grid(tp=3), "dp4 ep4": make_grid(dp=4, ep=4),
    "dp4 tp2 ep8": make_grid(dp=4, tp=2, ep=8), "dp2 tp2 ep2 etp2": make_grid(dp=2, tp=2, ep=2, etp=2),
    "tp2 ep3, uneven": make_grid(tp=3, ep=3), "tp2 ep1 etp1, experts on both": make_grid(tp=2, ep=1, etp=1),
}  # fmt: skip


def run(oracle: Oracle, grid: Grid, x: Tensor, given: Mapping[str, Stored] | None = None) -> list[Tensor]:
    """The block's output on every rank; `given` weights are put in the place of the rank's own."""

    def rank(comm: Comm) -> Tensor:
        ctx = context(oracle, grid, comm, torch.float64)
        return moe(ctx, oracle.layer, {**cut(oracle, ctx), **(given or {})}, x)[0]

    return VirtualWorld(grid.world).run(rank)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("normed", [True, False])
def test_it_equals_the_plain_loop(grid: str, normed: bool) -> None:
    oracle, x = make_layer({**KDA, **MOE}), tokens(13).double()
    if not normed:
        oracle = replace(oracle, whole={n: w for n, w in oracle.whole.items() if n != "moe.latent_norm"})
    expected = moe_plain(oracle.whole, x, MOE)
    for y in run(oracle, GRIDS[grid], x):
        assert relative(y, expected) < 1e-13


def test_packed_experts_give_what_their_numbers_give() -> None:
    oracle, x = make_layer({**KDA, **MOE}), tokens(13).double()
    draw = torch.Generator().manual_seed(5)
    packed, whole = {}, dict(oracle.whole)
    for name in ("experts.gate", "experts.up", "experts.down"):
        count, rows, columns = whole[name].shape
        values = torch.randint(0, 256, (count, rows, columns // 2), dtype=torch.uint8, generator=draw)
        scale = torch.randint(122, 127, (count, rows, columns // 8), dtype=torch.uint8, generator=draw)
        packed[name] = Stored(values, scale, "mxfp4_group", (1, 8))
        whole[name] = decode(values, scale, 8, torch.float64)
    oracle = replace(oracle, whole=whole)
    expected = moe_plain(whole, x, MOE)
    gate, up = packed["experts.gate"], packed["experts.up"]
    assert gate.scale is not None and up.scale is not None
    fused = Stored(
        torch.cat([gate.values, up.values], 1), torch.cat([gate.scale, up.scale], 1), gate.format, gate.block
    )
    stacked = {"experts.gate_up": fused, "experts.down": packed["experts.down"]}
    assert relative(run(oracle, make_grid(), x, stacked)[0], expected) < 1e-13
    numbers = Stored(torch.cat([whole["experts.gate"], whole["experts.up"]], 1))
    assert relative(run(oracle, make_grid(), x, {"experts.gate_up": numbers})[0], expected) < 1e-13


def normed_before(
    ctx: RankContext, words: Mapping[str, Any], weights: LayerWeights, y: Tensor, shares: Tensor
) -> Tensor:
    """The norm on every expert's product, before they are summed."""
    y = rms_norm(y, dense(take(weights, "moe.latent_norm"), ctx.compute), EPS)
    out = (shares[..., None] * y).sum(1)
    return out @ dense(take(weights, "moe.latent_up"), ctx.compute).T


def test_a_norm_before_the_sum_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    oracle, x = make_layer({**KDA, **MOE}), tokens(13).double()
    monkeypatch.setattr(block, "combine", normed_before)
    assert relative(run(oracle, make_grid(tp=2), x)[0], moe_plain(oracle.whole, x, MOE)) > 1e-2


def test_w1_and_w3_swapped_are_seen() -> None:
    oracle, x = make_layer({**KDA, **MOE}), tokens(13).double()
    whole = oracle.whole
    swapped = replace(oracle, whole={**whole, "experts.gate": whole["experts.up"], "experts.up": whole["experts.gate"]})
    assert relative(run(swapped, make_grid(), x)[0], moe_plain(whole, x, MOE)) > 1e-2


@pytest.mark.parametrize(("role", "message"), [
    ("moe.latent_down", "the weight moe.latent_down is missing"),
    ("moe.latent_up", "the weight moe.latent_up is missing"),
])  # fmt: skip
def test_a_missing_latent_weight_is_named(role: str, message: str) -> None:
    oracle = make_layer({**KDA, **MOE})
    less = replace(oracle, whole={name: w for name, w in oracle.whole.items() if name != role})
    with pytest.raises(RuntimeFault, match=message):
        run(less, make_grid(), tokens(3).double())


def test_experts_of_another_width_are_refused() -> None:
    oracle = make_layer({**KDA, **MOE})
    wide = Stored(torch.ones(8, 48, 32, dtype=torch.float64))
    with pytest.raises(RuntimeFault, match=r"experts\.gate.*\[48, 32\].*width 16"):
        run(oracle, make_grid(), tokens(3).double(), {"experts.gate_up": wide})


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_the_dense_unit(tp: int) -> None:
    oracle, x = make_layer({**KDA, **DENSE}), tokens(5).double()

    def rank(comm: Comm) -> Tensor:
        ctx = context(oracle, make_grid(tp=tp), comm, torch.float64)
        return swiglu(ctx, oracle.layer.words, cut(oracle, ctx), "mlp", "ffn", x)

    for y in VirtualWorld(tp).run(rank):
        assert relative(y, unit_plain(oracle.whole, "mlp", x)) < 1e-13


def test_situ_is_bounded_and_is_no_silu() -> None:
    gate, up = 3 * tokens(50).double(), 30 * tokens(50, seed=1).double()
    found = gated(SITU, gate, up)
    assert relative(found, situ_plain(gate, up)) < 1e-14
    assert float(found.abs().max()) < 100
    assert relative(gated({"act": "silu"}, gate, up), found) > 0.1
    huge = torch.tensor([-1e9, 0.0, 1e9])
    assert gated(SITU, huge, huge).tolist() == [0.0, 0.0, 100.0]
    assert gated({**SITU, "beta": 2.0, "linear_beta": 3.0}, huge, huge).tolist() == [0.0, 0.0, 6.0]


def test_situ_is_computed_in_float32() -> None:
    gate, up = tokens(50).bfloat16(), tokens(50, seed=1).bfloat16()
    found = gated(SITU, gate, up)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, gated(SITU, gate.float(), up.float()).bfloat16())
