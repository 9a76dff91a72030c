"""Kimi K3 at full size, from sparse headers: totals of the published index, weights and caches a card, and the gate.

The figures are those of the published index and of reports of engines (weights a card at TP8: 191.81 GiB).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shard_plans.checkpoints.headers import Kinds, read_header
from shard_plans.documents.plan import Workload
from shard_plans.errors import CheckpointError, ConfigError, GridError, ReshardError
from shard_plans.families.binding import Binding
from shard_plans.inspect import inspect
from shard_plans.memory.cluster import parse_cluster
from shard_plans.memory.count import with_ledger
from shard_plans.memory.needs import kv_cache, stream
from shard_plans.memory.payload import Payload, rank_weights
from shard_plans.placement.grid import Grid
from shard_plans.placement.place import constants, place
from shard_plans.search.search import search
from tests.checkpoints.giant import make_giant, write_sparse
from tests.tools.converted import bound
from tests.tools.plans import make_plan

GIB = 2**30
WEIGHTS = [
    (8, 1, 191.81), (16, 1, 101.67), (32, 1, 56.6), (8, 3, 64.3), (8, 4, 48.9), (16, 2, 51.3), (8, 5, 39.3),
    (8, 8, 24.8), (8, 12, 16.5),
]  # fmt: skip
"""tp (experts whole, ep = tp), pp, GiB of the fullest rank with the layers split evenly, the first stages one more."""


@pytest.fixture(scope="module")
def k3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Binding]:
    folder = tmp_path_factory.mktemp("giant") / "kimi-k3"
    make_giant("kimi-k3", folder)
    yield bound(folder)
    shutil.rmtree(folder)


def even(layers: int, pp: int) -> tuple[tuple[int, int], ...]:
    base, more = divmod(layers, pp)
    edges = np.cumsum([0] + [base + (stage < more) for stage in range(pp)]).tolist()
    return tuple(pairwise(edges))


def test_totals_are_those_of_the_published_index(k3: Binding) -> None:
    assert (len(k3.checkpoint), k3.checkpoint.total_bytes) == (497_220, 1_560_860_324_864)
    assert sum(len(part.tensors) for p in k3.parameters for part in p.parts) == 497_220
    assert inspect(k3.checkpoint.folder).parameters == 2_779_931_837_184
    mixers = [layer.kinds["mixer"] for layer in k3.model.layers]
    assert [index for index, mixer in enumerate(mixers) if mixer == "mla"] == [*range(3, 92, 4), 92]


@pytest.mark.parametrize(("tp", "pp", "gib"), WEIGHTS)
def test_weights_a_card(k3: Binding, tp: int, pp: int, gib: float) -> None:
    plan = replace(make_plan(k3, {"tp": tp, "pp": pp, "ep": tp}), stages=even(93, pp))
    fullest = max(rank_weights(Payload(k3), plan)) / GIB
    assert round(fullest, len(str(gib).partition(".")[2])) == gib


@pytest.mark.parametrize(
    ("tp", "pp", "format", "gib"),
    [
        (8, 3, "fp8_block", 114.4), (8, 4, "fp8_block", 86.1), (16, 2, "fp8_block", 88.5), (32, 1, "fp8_block", 93.8),
        (8, 5, "fp8_block", 70.0), (8, 8, "fp8_block", 44.2), (8, 12, "fp8_block", 29.5),
        (32, 1, "bf16", 173), (8, 8, "bf16", 85.5), (8, 12, "bf16", 57.0),
    ],
)  # fmt: skip
def test_weights_a_card_with_experts_in_another_format(k3: Binding, tp: int, pp: int, format: str, gib: float) -> None:
    plan = replace(make_plan(k3, {"tp": tp, "pp": pp, "ep": tp}), stages=even(93, pp))
    fullest = max(rank_weights(Payload(k3, weights={"experts": format}), plan)) / GIB
    assert round(fullest, len(str(gib).partition(".")[2])) == gib


def test_cards_that_weights_alone_need(k3: Binding) -> None:
    """On cards of 80 GB, a utilisation of 1.0, eight a server, one stage a server: 24 as stored, 40 in FP8."""
    for weights, servers in ({}, 3), ({"experts": "fp8_block"}, 5):
        payload = Payload(k3, weights=weights)
        for pp in (servers - 1, servers):
            plan = replace(make_plan(k3, {"tp": 8, "pp": pp, "ep": 8}), stages=even(93, pp))
            assert (max(rank_weights(payload, plan)) <= 80 * 10**9) is (pp == servers)


def test_the_ledger_counts_what_the_placement_lays_out(k3: Binding) -> None:
    plan = make_plan(k3, {"tp": 8, "pp": 12, "ep": 8})
    placement = place(k3, plan)
    sizes = {file.name: file.nbytes for file in placement.files}
    laid_out = tuple(sum(sizes[name] for name in names) for _, names in placement.ranks)
    assert laid_out == rank_weights(Payload(k3), plan)


def test_tails_of_zeros_are_declared(k3: Binding) -> None:
    found = constants(k3, make_plan(k3))
    assert len(found) == 69
    assert {constant.region for constant in found} == {((96, 128),)}
    assert found[0].pattern == "language_model.model.layers.0.self_attn.A_log"


@pytest.mark.parametrize(("tp", "mib"), [(1, 428.6), (8, 53.6), (16, 26.8)])
def test_state_of_one_sequence(k3: Binding, tp: int, mib: float) -> None:
    """69 KDA layers: convolution inputs in bf16 and the recurrent state in fp32, whatever the context."""
    workload = Workload(context=1_048_576, concurrency=1)
    layers = [layer for layer in k3.model.layers if layer.words["attn"] == "kda"]
    state = sum(kv_cache(layer, k3.model, Grid(tp=tp, etp=tp), workload) for layer in layers)
    assert round(state / 2**20, 1) == mib


@pytest.mark.parametrize(("dtype", "width"), [("bf16", 27_648), ("fp8_raw", 13_824), ("fp8", 13_824 + 24 * 4)])
def test_latent_cache_of_a_token_is_whole_on_every_rank(k3: Binding, dtype: str, width: int) -> None:
    for tp in (1, 8, 16):
        workload = Workload(context=1024, concurrency=1, kv_dtype=dtype)
        layers = [layer for layer in k3.model.layers if layer.words["attn"] == "mla"]
        assert sum(kv_cache(layer, k3.model, Grid(tp=tp, etp=tp), workload) for layer in layers) == 1024 * width


def test_a_stage_border_carries_the_bank(k3: Binding) -> None:
    assert [stream(k3.model, layer) for layer in (0, 1, 12, 13, 48, 92)] == [1, 2, 2, 3, 5, 9]


@pytest.mark.parametrize(("cluster", "fits"), [("1x8:80GB", False), ("3x8:80GB", False), ("4x8:s5000", True)])
def test_the_planned_stages_are_no_worse_than_even_ones(k3: Binding, cluster: str, fits: bool) -> None:
    plan = search(k3, parse_cluster(cluster))
    assert plan.fits is fits
    others = with_ledger(replace(plan, stages=even(93, plan.grid.pp)), k3)
    ours, theirs = (max(row.total for row in found.ledger or ()) for found in (plan, others))
    assert ours <= theirs


def test_tp_that_does_not_divide_the_heads_is_refused(k3: Binding) -> None:
    with pytest.raises(GridError, match=r"tp 5 doesn't divide .*; legal tp: 1, 2, 3, 4, 6, 8, 12, 16"):
        place(k3, make_plan(k3, {"tp": 5}))


def small(folder: Path, **text: Any) -> Path:
    """The first two layers, with other sizes."""

    def change(config: dict[str, Any]) -> None:
        config["text_config"] |= {"num_hidden_layers": 2} | text
        linear = config["text_config"]["linear_attn_config"]
        linear["kda_layers"], linear["full_attn_layers"] = [1, 2], []

    make_giant("kimi-k3", folder, change)
    return folder


def test_pruned_experts_are_a_matter_of_the_config(tmp_path: Path) -> None:
    """896 is no constant; the shapes that depend on it are the router's and its bias's."""

    def narrower(name: str, shape: list[int]) -> list[int]:
        return [512 if size == 896 else size for size in shape]

    folder = small(tmp_path / "k3", num_experts=512)
    reshape(folder, narrower)
    binding = bound(folder)
    assert binding.model.sizes["experts"] == 512
    place(binding, make_plan(binding, {"tp": 8, "ep": 8}))


def test_another_latent_width_is_a_matter_of_the_config(tmp_path: Path) -> None:
    folder = small(tmp_path / "k3", routed_expert_hidden_size=2048)

    def narrower(name: str, shape: list[int]) -> list[int]:
        width = {3584: 2048, 1792: 1024, 112: 64}
        moe = "routed_expert" in name or ".experts." in name
        return [width.get(size, size) if moe else size for size in shape]

    reshape(folder, narrower)
    assert bound(folder).model.sizes["latent"] == 2048


@pytest.mark.parametrize(
    ("name", "dtype", "words"),
    [
        ("layers.1.block_sparse_moe.gate.e_score_correction_bias", "BF16", "stored as BF16, allowed: F32"),
        ("layers.0.self_attn.A_log", "BF16", "stored as BF16, allowed: F32"),
        ("layers.1.block_sparse_moe.gate.weight", "F32", "stored as F32, allowed: BF16"),
    ],
)
def test_a_tensor_of_the_wrong_type_is_refused_by_name(tmp_path: Path, name: str, dtype: str, words: str) -> None:
    folder = small(tmp_path / "k3")
    reshape(folder, lambda _, shape: shape, {f"language_model.model.{name}": dtype})
    with pytest.raises(CheckpointError, match=f"{name} is {words}"):
        bound(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [("mla_use_output_gate", False), ("hidden_act", "silu"), ("moe_router_activation_func", "softmax")],
)
def test_a_config_that_the_table_does_not_cover_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    folder = small(tmp_path / "k3", **{key: value})
    with pytest.raises(ConfigError, match=f"{key} is {value!r}"):
        bound(folder)


def test_a_tower_without_its_config_section_is_refused(tmp_path: Path) -> None:
    folder = small(tmp_path / "k3")
    config = json.loads((folder / "config.json").read_text())
    del config["vision_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ReshardError, match=r"vision_tower\..* by config.json it must not be"):
        bound(folder)


def reshape(folder: Path, change: Any, dtypes: dict[str, str] | None = None) -> None:
    """Write the sparse files again with other shapes and types."""
    for path in sorted(folder.glob("*.safetensors")):
        header = read_header(path, Kinds())
        rows = zip(header.names, header.dtypes, header.shapes, strict=True)
        stored = [(name, (dtypes or {}).get(name, dtype), change(name, list(shape))) for name, dtype, shape in rows]
        write_sparse(path, stored)
