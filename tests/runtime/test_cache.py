"""The key-value cache: prefill and then token by token equals one pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from runtime.blocks.cache import FIRST_CAPACITY, LayerCache
from runtime.blocks.forward import run_layer
from runtime.comm.comm import Comm
from runtime.comm.virtual import VirtualWorld
from shard_plans.errors import RuntimeFault
from shard_plans.placement.grid import Grid, make_grid
from tests.tools.oracle import Oracle, context, cut, make, relative, tokens

GRIDS = {"one rank": make_grid(), "tp2 ep2": make_grid(tp=2, ep=2), "tp4 ep2": make_grid(tp=4, ep=2)}


def steps(oracle: Oracle, grid: Grid, x: Tensor, chunks: list[int], shift: int = 0) -> tuple[Tensor, LayerCache]:
    """Rank 0's output for x given in chunks, through one cache a rank; later chunks at positions shifted by `shift`."""

    def rank(comm: Comm) -> tuple[Tensor, LayerCache]:
        ctx = context(oracle, grid, comm)
        weights, cache = cut(oracle, ctx), LayerCache()
        outputs: list[Tensor] = []
        for chunk in torch.split(torch.arange(x.shape[0]), chunks):
            positions = chunk + (shift if outputs else 0)
            outputs.append(run_layer(ctx, oracle.layer, weights, x[chunk], cache, positions)[0])
        return torch.cat(outputs), cache

    return VirtualWorld(grid.world).run(rank)[0]


@pytest.mark.parametrize("name", ["llama", "qwen2_window", "qwen3_moe", "v3_dense", "v3_direct", "v3_moe"])
@pytest.mark.parametrize("grid", GRIDS)
def test_token_by_token_equals_prefill(name: str, grid: str) -> None:
    oracle, x = make(name), tokens(12)
    expected = oracle.forward(x)
    assert relative(steps(oracle, GRIDS[grid], x, [12])[0], expected) < 2e-6
    assert relative(steps(oracle, GRIDS[grid], x, [7, 1, 1, 1, 2])[0], expected) < 2e-6


@pytest.mark.parametrize("name", ["llama", "v3_dense"])
def test_wrong_positions_are_seen(name: str) -> None:
    oracle, x = make(name), tokens(12)
    assert relative(steps(oracle, make_grid(), x, [7, 5], shift=1)[0], oracle.forward(x)) > 1e-3


def test_only_the_latent_is_kept() -> None:
    _, latent = steps(make("v3_dense"), make_grid(tp=2), tokens(12), [12])
    sizes = make("v3_dense").model.sizes
    assert latent.length == 12
    assert latent.nbytes == FIRST_CAPACITY * (8 + 4 * (sizes["kv_lora"] + sizes["rope"]))


def test_it_grows_by_doubling_and_keeps_what_it_held() -> None:
    cache, kept, capacities = LayerCache(), [], set()
    for start in range(0, 3 * FIRST_CAPACITY, 5):
        part = torch.full((5, 2), float(start))
        kept.append(part)
        positions, (all_parts,) = cache.append(torch.arange(start, start + 5), [part])
        capacities.add(cache.nbytes)
        assert torch.equal(all_parts, torch.cat(kept)) and torch.equal(positions, torch.arange(start + 5))
    assert sorted(capacities) == [FIRST_CAPACITY * 16 * factor for factor in (1, 2, 4)]


def test_it_may_store_another_type() -> None:
    cache, part = LayerCache(torch.bfloat16), torch.randn(3, 4)
    _, (back,) = cache.append(torch.arange(3), [part])
    assert back.dtype == torch.float32 and torch.equal(back, part.bfloat16().float())
    assert cache.nbytes == FIRST_CAPACITY * (8 + 2 * 4)


def test_it_forgets_the_end() -> None:
    cache = LayerCache()
    cache.append(torch.arange(4), [torch.arange(4.0)])
    cache.truncate(2)
    positions, (values,) = cache.append(torch.tensor([2]), [torch.tensor([9.0])])
    assert positions.tolist() == [0, 1, 2] and values.tolist() == [0.0, 1.0, 9.0]
    with pytest.raises(RuntimeFault, match="can't cut 3 tokens to 4"):
        cache.truncate(4)


def test_another_layers_tensors_are_refused() -> None:
    cache = LayerCache()
    cache.append(torch.arange(2), [torch.ones(2, 3)])
    with pytest.raises(RuntimeFault, match="one cache for each layer"):
        cache.append(torch.arange(1), [torch.ones(1, 4)])
    with pytest.raises(RuntimeFault, match="for 2 tokens"):
        cache.append(torch.arange(2), [torch.ones(1, 3)])
