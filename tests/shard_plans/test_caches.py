"""What layers keep, against the figures that engines printed in public logs, and what their sources state."""

from __future__ import annotations

from typing import Any

import pytest

from shard_plans.documents.plan import Workload
from shard_plans.errors import FamilyError
from shard_plans.families.model import Layer, Model
from shard_plans.memory.buffers import communication, deepep_low_latency
from shard_plans.memory.caches import cached, kept
from shard_plans.memory.kv_format import kv_format
from shard_plans.memory.needs import stage_ranges
from shard_plans.memory.pool import hybrid_block, pool_tokens
from shard_plans.placement.grid import Grid, make_grid

GIB = 1 << 30


def model(layers: int, words: dict[str, Any], **sizes: int) -> Model:
    """A model of equal layers with these sizes."""
    return Model("toy", {}, {}, sizes, tuple(Layer(i, {}, words) for i in range(layers)), {}, False)


def held(model: Model, grid: Grid, workload: Workload, operator: str = "") -> int:
    items = [(layer, item) for layer in model.layers for item in kept(layer, model, grid, workload)]
    return sum(cached(item, grid, workload).typical for _, item in items if operator in item.operator)


MLA = {"kv_lora": 512, "rope": 64, "index_dim": 128}
DSA = {"attn": "mla", "index": "dsa"}
PREVIOUS = {"attn": "mla", "index": "previous"}


@pytest.mark.parametrize(
    ("engine", "dtype", "layers", "words", "tokens", "gib"),
    [
        ("sglang", "bf16", 61, DSA, 256_000, 18.68),  # DeepSeek-V3.2: 1,152 + 132 bytes a layer
        ("sglang", "bf16", 78, DSA, 314_304, 29.32),  # GLM-5
        ("vllm", "fp8", 78, DSA, 131_072, 7.51),  # GLM-5 class: 656 + 132
        ("sglang", "fp8_raw", 78, PREVIOUS, 464_768, 23.91),  # GLM-5.2: 576 + 132, an index buffer in every layer
    ],
)
def test_latents_and_index_keys(
    engine: str, dtype: str, layers: int, words: dict[str, Any], tokens: int, gib: float
) -> None:
    found = held(model(layers, words, **MLA), make_grid(tp=8), Workload(tokens, 1, dtype, engine=engine))
    assert found / GIB == pytest.approx(gib, abs=0.011)


def test_layers_that_reuse_picks_have_no_index_keys_elsewhere() -> None:
    toy = model(1, PREVIOUS, **MLA)
    assert held(toy, make_grid(), Workload(1000, 1, engine="vllm"), "index") == 0
    assert held(toy, make_grid(), Workload(1000, 1, engine="sglang"), "index") == 132 * 1001  # and a spare page


def test_full_layers_of_gpt_oss() -> None:
    toy = model(18, {"attn": "gqa"}, kv_heads=8, head_dim=64)
    assert held(toy, make_grid(), Workload(131_072, 2, "fp16")) == 9216 << 20


def test_states_of_gated_delta_net() -> None:
    """Qwen3.5-397B, tp 2, 82 + 1 slots: 7.29 GiB of states, 0.13 of convolutions."""
    toy = model(45, {"attn": "gdn"}, key_heads=16, per_key=4, dk=128, dv=128, taps=4)
    load, grid = Workload(1000, 83), make_grid(tp=2)
    assert held(toy, grid, load, "recurrent") / GIB == pytest.approx(7.29, abs=0.01)
    assert held(toy, grid, load, "convolution") / GIB == pytest.approx(0.13, abs=0.005)
    whole = held(toy, make_grid(), load)
    assert held(toy, make_grid(tp=3), load) == whole  # key heads that don't divide stay whole


def test_states_of_kimi_delta_attention() -> None:
    """Kimi K3: 27,648 + 786,432 bytes a layer at tp 8; SGLang printed 15.67 GB for 309 slots and one more."""
    toy = model(69, {"attn": "kda"}, kda_heads=96, kda_dim=128, taps=4)
    grid, one = make_grid(tp=8), Workload(1_048_576, 1)
    assert held(toy, grid, one) == 69 * (27_648 + 786_432)
    assert held(toy, grid, one) / (1 << 20) == pytest.approx(53.6, abs=0.05)
    assert held(toy, make_grid(), one) / (1 << 20) == pytest.approx(428.6, abs=0.05)
    assert held(toy, make_grid(tp=16), one) / (1 << 20) == pytest.approx(26.8, abs=0.05)
    assert held(toy, grid, Workload(1, 310), "recurrent") / GIB == pytest.approx(15.67, abs=0.005)
    assert held(toy, grid, Workload(1, 310), "convolution") / GIB == pytest.approx(0.55, abs=0.005)


def test_compressed_attention_is_uncertain() -> None:
    """DeepSeek-V4-Flash by the formulas: 3,850 bytes a token in the long run, 21 layers by 4 and 20 by 128."""
    by_4 = {"attn": "compressed", "window": 128, "compress": 4, "overlap": 2, "index_topk": 512}
    by_128 = {"attn": "compressed", "window": 128, "compress": 128}
    words = [by_4] * 21 + [by_128] * 20
    layers = tuple(Layer(i, {}, each) for i, each in enumerate(words))
    toy = Model("toy", {}, {}, {"head_dim": 512, "rope": 64, "index_dim": 128}, layers, {}, False)

    def low(tokens: int) -> int:
        load = Workload(tokens, 1, "fp8", prefill_chunk=1)
        return sum(
            cached(item, make_grid(), load).low for each in layers for item in kept(each, toy, make_grid(), load)
        )

    assert (low(4_000_000) - low(2_000_000)) / 2_000_000 == pytest.approx(3850, abs=1)
    item = kept(layers[0], toy, make_grid(), Workload(1000, 1, "fp8"))[0]
    amount = cached(item, make_grid(), Workload(1000, 1, "fp8"))
    assert item.record == 584 and amount.low < amount.typical < amount.high


def test_index_keys_of_block_sparse_attention_and_chunks() -> None:
    toy = model(2, {"attn": "gqa", "index": "block"}, kv_heads=4, head_dim=128, index_dim=128)
    assert held(toy, make_grid(tp=2), Workload(96, 1)) == 2 * 96 * (2 * 2 * 128 * 2 + 128 * 2)
    chunked = model(1, {"attn": "gqa", "chunk": 64}, kv_heads=1, head_dim=8)
    assert held(chunked, make_grid(), Workload(1000, 1, prefill_chunk=1)) == (64 + 16) * 32


@pytest.mark.parametrize(
    ("dtype", "vector"),
    [("bf16", 256), ("fp32", 512), ("fp8_raw", 128), ("fp8", 132), ("mxfp8", 132), ("int8", 132), ("fp4", 72)],
)
def test_scales_of_cache_types(dtype: str, vector: int) -> None:
    stored = kv_format("fp8_per_token_head" if dtype == "fp8" else dtype)  # as reshard stores it
    assert stored.vector(128) == vector and kv_format("fp8").vector(128) == 128
    toy = model(1, {"attn": "gqa"}, kv_heads=2, head_dim=128)
    assert held(toy, make_grid(), Workload(16, 3, dtype)) == 48 * 2 * 2 * vector
    assert kv_format("fp8_ds_mla").latent(512, 64) == 656 and kv_format("nvfp4_ds_mla").latent(512, 64) == 352


def test_pages_windows_and_prefixes() -> None:
    toy = model(1, {"attn": "gqa"}, kv_heads=1, head_dim=8)  # 32 bytes a token
    assert held(toy, make_grid(), Workload(100, 3, engine="vllm")) == 3 * 112 * 32
    assert held(toy, make_grid(), Workload(100, 3, prefix=40, engine="sglang")) == (40 + 3 * 60 + 1) * 32
    assert held(toy, make_grid(), Workload(100, 3, prefix=40, engine="vllm")) == (32 + 3 * 80) * 32  # two whole pages
    assert held(toy, make_grid(dp=3), Workload(100, 3, prefix=40)) == 112 * 32
    window = model(1, {"attn": "gqa", "window": 33}, kv_heads=1, head_dim=8)
    assert held(window, make_grid(), Workload(1000, 1, prefill_chunk=16, engine="vllm")) == (3 + 1) * 16 * 32
    assert held(window, make_grid(), Workload(20, 1, prefill_chunk=16, engine="vllm")) == 2 * 16 * 32
    assert held(window, make_grid(), Workload(1000, 1, engine="sglang")) == 801 * 32


def test_an_attention_that_is_not_known() -> None:
    with pytest.raises(FamilyError, match="isn't known"):
        held(model(1, {"attn": "unheard_of"}), make_grid(), Workload())
    with pytest.raises(FamilyError, match="the size dk"):
        held(model(1, {"attn": "gdn"}, key_heads=1), make_grid(), Workload())


@pytest.mark.parametrize(
    ("engine", "words", "sizes", "layers", "tp", "context", "gib", "tokens"),
    [
        ("vllm", {"attn": "gqa"}, {"kv_heads": 4, "head_dim": 128}, 94, 4, 40_960, 27.85, 621_392),  # Qwen3-235B
        ("vllm", {"attn": "mla"}, {"kv_lora": 512, "rope": 64}, 61, 8, 262_144, 160.63, 2_454_421),  # Kimi-K2.5
        ("vllm", {"attn": "gqa"}, {"kv_heads": 8, "head_dim": 128}, 32, 1, 32_768, 54.62, 447_088),  # Llama-3.1-8B
    ],
)
def test_tokens_that_a_pool_holds(
    engine: str,
    words: dict[str, Any],
    sizes: dict[str, int],
    layers: int,
    tp: int,
    context: int,
    gib: float,
    tokens: int,
) -> None:
    toy = model(layers, words, **sizes)
    found = pool_tokens(toy, make_grid(tp=tp), Workload(context, 1, engine=engine), (0, layers), round(gib * GIB))
    assert found == pytest.approx(tokens, rel=0.002)


def hybrid() -> Model:
    """gpt-oss-120b's attention: every other layer with a window of 128."""
    words: list[dict[str, Any]] = [{"attn": "gqa", "window": 128}, {"attn": "gqa"}]
    return Model(
        "toy", {}, {}, {"kv_heads": 8, "head_dim": 64}, tuple(Layer(i, {}, words[i % 2]) for i in range(36)), {}, False
    )


def test_tokens_of_a_hybrid_pool_as_printed() -> None:
    """gpt-oss-120b with 8.99 GiB printed 130,960 tokens when blocks were dealt to two groups."""
    load = Workload(131_072, 1, prefill_chunk=8192, engine="vllm@0.11")
    room = round(8.99 * GIB)
    assert pool_tokens(hybrid(), make_grid(), load, (0, 36), room) == pytest.approx(130_960, rel=0.001)
    later = pool_tokens(hybrid(), make_grid(), Workload(131_072, 1, engine="vllm"), (0, 36), room)
    blocks = room // (18 * 2048 * 16)
    assert later == int(blocks / (8192 + 521) * 131_072)


def gdn_hybrid(layers: int, **sizes: int) -> Model:
    """Qwen3.5's mixers: three of gated DeltaNet, one of attention."""
    words = [{"attn": "gqa"} if i % 4 == 3 else {"attn": "gdn"} for i in range(layers)]
    every = {"head_dim": 256, "key_heads": 16, "dk": 128, "dv": 128, "taps": 4, **sizes}
    return Model("toy", {}, {}, every, tuple(Layer(i, {}, words[i]) for i in range(layers)), {}, False)


def test_states_and_pages_share_a_pool() -> None:
    """Qwen3.5-35B-A3B: 18.64 GiB printed 925,508 tokens, 7.06 requests of 131,072."""
    toy = gdn_hybrid(40, kv_heads=2, per_key=2)
    load = Workload(131_072, 1, engine="vllm")
    assert pool_tokens(toy, make_grid(), load, (0, 40), round(18.64 * GIB)) == 925_508
    once = pool_tokens(toy, make_grid(), Workload(131_072, 1, engine="vllm@0.11"), (0, 40), round(18.64 * GIB))
    assert once != 925_508


def test_a_page_that_holds_a_state() -> None:
    """Qwen3.8-27B, fp8 cache: "Setting attention block size to 1568 tokens", "Padding mamba page size by 0.13%"."""
    toy = gdn_hybrid(4, kv_heads=4, per_key=3)
    load = Workload(1000, 1, "fp8_raw")
    items = [kept(layer, toy, make_grid(), load) for layer in toy.layers]
    state, record = sum(item.state for item in items[0]), items[3][0].record
    assert hybrid_block(record, state, 16) == 1568
    assert 1568 * record / state == pytest.approx(1.0013, abs=0.0001)


def test_deepep_s_low_latency_buffer() -> None:
    """1.78 GiB for hidden 7168, 256 experts, 128 tokens a rank, by DeepEP's own configuration."""
    assert deepep_low_latency(7168, 256, 128) / GIB == pytest.approx(1.78, abs=0.005)


def test_dispatch_by_its_kind() -> None:
    toy = model(1, {"attn": "gqa", "ffn": "moe"}, hidden=7168, topk=8, experts=256, kv_heads=1, head_dim=8)
    near, far = make_grid(tp=8, ep=8), make_grid(tp=8, dp=2, ep=16)

    def buffer(grid: Grid, dispatch: str) -> int:
        return communication(toy, grid, Workload(dispatch=dispatch, engine="vllm"))["expert dispatch"]

    assert buffer(near, "deepep_high_throughput") == 1 << 30 and buffer(far, "deepep_high_throughput") == 2 << 30
    assert buffer(near, "deepep_low_latency") == deepep_low_latency(7168, 256, 128)
    assert "expert dispatch" not in communication(toy, make_grid(), Workload())


def test_towers_need_their_images() -> None:
    sizes = {"hidden": 64, "vocab": 10, "heads": 1, "kv_heads": 1, "head_dim": 8, "ffn": 8, "vt": 16, "merge": 4}
    layers = (Layer(0, {}, {"attn": "gqa", "ffn": "swiglu"}),)
    blind = Model("toy", {}, {}, sizes, layers, {}, False)
    seeing = Model("toy", {}, {}, sizes, layers, {"tower": "moonvit"}, False)
    few = [stage_ranges(m, make_grid(), Workload(64, 1, image_tokens=100), 0, (0, 1)) for m in (blind, seeing)]
    assert few[1]["activations"].low > few[0]["activations"].low + 100 * 64 * 2
    assert stage_ranges(seeing, make_grid(), Workload(64, 1), 0, (0, 1))["activations"].low > few[1]["activations"].low
