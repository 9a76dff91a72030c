"""The key-value cache: prefill and then token by token equals one pass."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from runtime.blocks.cache import LayerCache
from runtime.blocks.forward import run_layer
from runtime.blocks.kv_format import KV_FORMATS
from runtime.blocks.pages import BLOCK, Pool
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


def test_only_the_latent_is_kept() -> None:
    _, latent = steps(make("v3_dense"), make_grid(tp=2), tokens(12), [12])
    sizes = make("v3_dense").model.sizes
    assert latent.length == 12
    assert latent.nbytes == BLOCK * 4 * (sizes["kv_lora"] + sizes["rope"])


@pytest.mark.parametrize("pieces", [[1] * 50, [50], [7] * 7 + [1], [16, 16, 16, 2], [15, 17, 18]])
def test_tokens_come_back_in_order_whatever_blocks_they_lie_in(pieces: list[int]) -> None:
    pool, whole = Pool(4), torch.arange(100.0).view(50, 2)
    other, cache = LayerCache(pool), LayerCache(pool)
    for positions in torch.split(torch.arange(50), pieces):
        other.append(positions, [-whole[positions]])  # takes every other block
        seen, (found,) = cache.append(positions, [whole[positions]])
        assert torch.equal(seen, torch.arange(cache.length)) and torch.equal(found, whole[: cache.length])
    assert len(cache.table) == 13 and pool.allocator.held == 26
    assert set(cache.table).isdisjoint(other.table)
    assert cache.nbytes == 13 * 4 * 2 * 4


@pytest.mark.parametrize(("window", "chunk", "most"), [(5, None, 3), (1, None, 1), (None, 8, 2), (16, 8, 2)])
def test_blocks_outside_the_window_are_freed_and_never_read(
    window: int | None, chunk: int | None, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, whole, read = Pool(4), torch.arange(40.0)[:, None], set[int]()
    inner = Pool.read

    def reading(pool: Pool, blocks: Sequence[int], stop: int, dtypes: Sequence[torch.dtype]) -> list[Tensor]:
        read.update(blocks)
        return inner(pool, blocks, stop, dtypes)

    monkeypatch.setattr(Pool, "read", reading)
    cache = LayerCache(pool)
    for token in range(40):
        read.clear()
        seen, (found,) = cache.append(torch.tensor([token]), [whole[token, None]], window, chunk)
        assert read == set(cache.table) and len(read) == pool.allocator.held <= most
        assert torch.equal(found[:, 0], seen.double().float())
        needed = [p for p in range(token + 1) if (window is None or token - p < window)
                  and (chunk is None or token // chunk == p // chunk)]  # fmt: skip
        assert set(needed) <= set(seen.tolist())
    assert pool.allocator.made <= most


@pytest.mark.parametrize(
    ("name", "bytes", "limit"), [("fp32", 4, 0), ("bf16", 2, 4e-3), ("fp8", 1, 0.04), ("int8", 1, 9e-3)]
)
def test_formats_round_each_vector_by_its_own_scale(name: str, bytes: int, limit: float) -> None:
    format = KV_FORMATS[name]
    part = torch.randn(3, 2, 64, generator=torch.Generator().manual_seed(5))
    part *= torch.tensor([1e-6, 1.0, 1e4])[:, None, None]
    part[1, 0] = 0
    cache = LayerCache(Pool(format=format))
    _, (back,) = cache.append(torch.arange(3), [part])
    assert back.dtype == torch.float32
    sizes = part.norm(dim=-1)
    assert bool(((back - part).norm(dim=-1) <= limit * sizes).all())
    assert cache.nbytes == BLOCK * 2 * (64 * bytes + (4 if format.largest else 0))
    again = LayerCache(Pool(format=format)).append(torch.arange(3), [back])[1][0]
    assert torch.allclose(again, back, rtol=1e-6, atol=0)


def test_nan_stays_nan() -> None:
    for name in ("fp8", "int8"):
        cache = LayerCache(Pool(format=KV_FORMATS[name]))
        _, (back,) = cache.append(torch.arange(2), [torch.tensor([[1.0, float("nan")], [1.0, 2.0]])])
        assert back[0].isnan().any() and not back[1].isnan().any()


def test_a_full_pool_says_what_is_needed() -> None:
    pool = Pool(4, 3)
    one, two = LayerCache(pool), LayerCache(pool)
    one.append(torch.arange(5), [torch.ones(5, 1)])
    assert pool.reserved == 3 * 4 * 4
    with pytest.raises(RuntimeFault, match=r"2 more blocks are needed and 1 of 3 are free.*--kv-blocks"):
        two.append(torch.arange(8), [torch.ones(8, 1)])
    assert not two.table
    one.free()
    two.append(torch.arange(8), [torch.ones(8, 1)])
    assert pool.reserved == 3 * 4 * 4 and one.nbytes == one.length == 0


def test_blocks_that_no_memory_holds_are_refused() -> None:
    with pytest.raises(RuntimeFault, match=r"no memory for 1048576 blocks of 1048576 tokens.*--kv-blocks"):
        LayerCache(Pool(1 << 20, 1 << 20)).append(torch.arange(2), [torch.ones(2, 512)])


def test_positions_go_on_where_the_sequence_stands() -> None:
    cache = LayerCache()
    cache.append(torch.arange(4), [torch.ones(4, 1)])
    for wrong in (3, 5):
        with pytest.raises(RuntimeFault, match="goes on at position 4"):
            cache.append(torch.tensor([wrong]), [torch.ones(1, 1)])


def test_another_layers_tensors_are_refused() -> None:
    cache = LayerCache()
    cache.append(torch.arange(2), [torch.ones(2, 3)])
    with pytest.raises(RuntimeFault, match="one cache for each layer"):
        cache.append(torch.arange(2, 3), [torch.ones(1, 4)])
    cache = LayerCache()
    with pytest.raises(RuntimeFault, match="one cache for each layer"):
        cache.append(torch.arange(2), [torch.ones(1, 3), torch.ones(2, 3)])
