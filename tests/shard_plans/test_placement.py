"""Placement: every stored element lands somewhere, in the order that the field expects."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shard_plans.errors import GridError, PlanError
from shard_plans.families.binding import Binding
from shard_plans.families.dims import Share, parse_dim
from shard_plans.families.formats import Format
from shard_plans.families.model import Model
from shard_plans.families.parameter import Parameter, Part
from shard_plans.placement.cuts import Cutter
from shard_plans.placement.experts import ExpertPlacement
from shard_plans.placement.layout import PAGE
from shard_plans.placement.place import place
from shard_plans.placement.shards import Placement, ShardTensor
from tests.conftest import MakeCheckpoint
from tests.tools.converted import bound
from tests.tools.plans import DENSE_PLANS, MOE_PLANS, make_plan, plan_id

FAMILIES = ["llama", "qwen2", "mixtral", "qwen3_moe_fp8", "deepseek_v3_fp8", "deepseek_v3_mtp"]


def elements(binding: Binding, tensor: ShardTensor) -> np.ndarray:
    """Where each element of a shard tensor comes from: (stored tensor, flat index) packed in one number; -1 is zero."""
    out = np.full(tensor.shape, -1, np.int64)
    for source in tensor.sources:
        for place_in_stack, number in enumerate(source.tensors.tolist()):
            stored = np.arange(int(np.prod(binding.checkpoint.shapes[number]))).reshape(
                binding.checkpoint.shapes[number]
            )
            for axis, cut in enumerate(source.cuts):
                index = [i // cut.repeat for start, stop in cut.runs for i in range(start, stop)]
                stored = np.take(stored, index, axis)
            target = out if source.experts is None else out[place_in_stack]
            target[tuple(slice(at, at + n) for at, n in zip(source.at, stored.shape, strict=True))] = stored + (
                number << 32
            )
    return out


def tensors(placement: Placement, rank: int) -> dict[str, ShardTensor]:
    """What one rank holds, by name."""
    files = {file.name: file for file in placement.files}
    return {tensor.name: tensor for name in placement.ranks[rank][1] for tensor in files[name].tensors}


@pytest.mark.parametrize("sizes", DENSE_PLANS + MOE_PLANS, ids=plan_id)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_element_is_on_a_rank(tiny: MakeCheckpoint, family: str, sizes: dict[str, int]) -> None:
    binding = bound(tiny(family))
    if "ep" in sizes and "experts" not in binding.model.sizes:
        with pytest.raises(GridError, match="dense models take ep 1 only"):
            place(binding, make_plan(binding, sizes))
        return
    placement = place(binding, make_plan(binding, sizes))
    seen: set[int] = set()
    for file in placement.files:
        for tensor in file.tensors:
            found = elements(binding, tensor)
            assert (found >= 0).all() or tensor.name in ("embed", "head"), tensor.name
            seen.update(found[found >= 0].tolist())
    checkpoint = binding.checkpoint
    assert len(seen) == sum(int(np.prod(shape)) for shape in checkpoint.shapes)
    assert len(placement.ranks) == make_plan(binding, sizes).grid.world
    assert {name for _, names in placement.ranks for name in names} == {file.name for file in placement.files}


def test_fused_parts_are_cut_part_by_part(tiny: MakeCheckpoint) -> None:
    """[q_r | k_r | v_r] and [gate_r | up_r], never a slice of the concatenation; few KV heads are repeated."""
    binding = bound(tiny("llama"))  # 8 heads, 2 KV heads of 16, ffn 96
    placement = place(binding, make_plan(binding, {"tp": 4}))
    number = binding.checkpoint.numbers
    q, k, v, gate, up, o = (
        np.arange(int(np.prod(binding.checkpoint.shapes[n]))).reshape(binding.checkpoint.shapes[n]) + (n << 32)
        for n in (number[f"model.layers.1.{name}_proj.weight"] for name in
                  ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up", "self_attn.o"))
    )  # fmt: skip
    for rank in range(4):
        held = tensors(placement, rank)
        kv = slice(rank // 2 * 16, rank // 2 * 16 + 16)
        want = np.concatenate([q[rank * 32 : rank * 32 + 32], k[kv], v[kv]])
        assert (elements(binding, held["layers.1.attn.qkv"]) == want).all()
        part = slice(rank * 24, rank * 24 + 24)
        assert (elements(binding, held["layers.1.mlp.gate_up"]) == np.concatenate([gate[part], up[part]])).all()
        assert (elements(binding, held["layers.1.attn.o"]) == o[:, rank * 32 : rank * 32 + 32]).all()


def test_scales_are_refined_by_repeating(tiny: MakeCheckpoint) -> None:
    """32 expert rows in blocks of 16 over etp 4: 8 rows a rank, so each stored scale serves two ranks."""
    binding = bound(tiny("qwen3_moe_fp8"))
    placement = place(binding, make_plan(binding, {"tp": 4, "ep": 1, "etp": 4}))
    for rank in range(4):
        scale = tensors(placement, rank)["layers.0.experts.gate_up.scale"]
        assert scale.block == (8, 16) and scale.shape[1] == 2
        rows = elements(binding, scale)[0, :, 0] & 0xFFFFFFFF
        columns = binding.checkpoint.shapes[int(scale.sources[0].tensors[0])][1]
        assert rows.tolist() == [rank // 2 * columns] * 2
        down = tensors(placement, rank)["layers.0.experts.down.scale"]
        assert down.block == (16, 8)
    with pytest.raises(PlanError, match="cuts inside a quantisation block of 16 x 16"):
        place(binding, make_plan(binding, {"tp": 4, "ep": 1, "etp": 4}, strict_blocks=True))


def test_uneven_experts_and_copies(tiny: MakeCheckpoint) -> None:
    binding = bound(tiny("mixtral"))  # 8 experts
    plan = make_plan(binding, {"tp": 1, "dp": 3, "ep": 3})
    shapes = [tensors(place(binding, plan), rank)["layers.2.experts.down"].shape[0] for rank in range(3)]
    assert shapes == [3, 3, 2]
    copies = ExpertPlacement(((0, 1, 2, 7), (3, 4, 5), (6, 7)), {1: ((7, 6, 5, 4), (3, 2), (1, 0))})
    placement = place(binding, replace(plan, experts=copies))
    assert tensors(placement, 0)["layers.1.experts.down"].sources[0].experts == (7, 6, 5, 4)
    assert tensors(placement, 2)["layers.0.experts.down"].sources[0].experts == (6, 7)


def test_replicas_share_files_unless_their_experts_differ(tiny: MakeCheckpoint) -> None:
    binding = bound(tiny("mixtral"))
    plan = make_plan(binding, {"tp": 4, "ep": 2, "etp": 1})
    assert len(place(binding, plan).files) == 4 + 2
    apart = ExpertPlacement(((0, 1, 2, 3), (4, 5, 6, 7), (4, 5, 6, 7), (0, 1, 2, 3)))
    placement = place(binding, replace(plan, experts=apart))
    assert len(placement.files) == 4 + 4
    assert "stage-0-edp-1-ep-0-etp-0.safetensors" in placement.ranks[2][1]


def test_tied_embedding_on_first_and_last_stage(tiny: MakeCheckpoint) -> None:
    binding = bound(tiny("qwen2"))
    alone = tensors(place(binding, make_plan(binding, {"tp": 2})), 0)
    assert "embed" in alone and "head" not in alone
    placement = place(binding, make_plan(binding, {"tp": 2, "pp": 3}))
    assert "head" not in tensors(placement, 0) and "embed" not in tensors(placement, 4)
    assert (elements(binding, tensors(placement, 0)["embed"]) == elements(binding, tensors(placement, 4)["head"])).all()


def test_mtp_kept_or_dropped(tiny: MakeCheckpoint) -> None:
    binding = bound(tiny("deepseek_v3_mtp"))
    kept = place(binding, make_plan(binding, {"tp": 2, "pp": 3}))
    assert any(name.startswith("layers.3.") for name in tensors(kept, 5)) and not kept.skipped
    dropped = place(binding, make_plan(binding, {"tp": 2, "pp": 3}, mtp="drop"))
    assert not any(name.startswith("layers.3.") for name in tensors(dropped, 5))
    gone = [name for name in binding.checkpoint.names if name.startswith("model.layers.3.")]
    assert sum(skip.count for skip in dropped.skipped) == len(gone)


def test_large_tensors_lie_on_pages(tiny: MakeCheckpoint) -> None:
    for file in place(binding := bound(tiny("deepseek_v3_fp8")), make_plan(binding, {"tp": 2, "ep": 2})).files:
        large = [tensor.nbytes % PAGE == 0 for tensor in file.tensors]
        assert large == sorted(large, reverse=True)
        layers = [-1 if t.layer is None else t.layer for t in file.tensors if t.nbytes % PAGE == 0 and t.name != "head"]
        assert layers == sorted(layers)


@pytest.mark.parametrize(
    ("family", "sizes", "words"),
    [
        ("llama_odd", {"tp": 2}, "tp 2 doesn't divide heads 9 of this llama model; legal tp: 1, 3"),
        ("llama", {"tp": 16}, "legal tp: 1, 2, 4, 8"), ("llama", {"tp": 2, "ep": 2}, "dense models take ep 1"),
        ("mixtral", {"tp": 1, "dp": 9, "ep": 9}, "ep 9 is more than the model's 8 experts"),
        ("mixtral", {"tp": 1, "dp": 5, "ep": 1, "etp": 5}, "etp 5 doesn't divide expert_ffn 96"),
        ("llama", {"pp": 4}, "pp 4 is more than the model's 3 layers"),
    ],
)  # fmt: skip
def test_what_does_not_divide_names_the_legal_sizes(
    tiny: MakeCheckpoint, family: str, sizes: dict[str, int], words: str
) -> None:
    binding = bound(tiny(family))
    with pytest.raises(GridError, match=words):
        place(binding, make_plan(binding, sizes))


def test_what_is_quantised_is_not_padded() -> None:
    """A vocabulary of 10 in blocks of 4 over 3 ranks would need scales for rows that nobody stored."""
    model = Model("own", {}, {}, {"vocab": 10, "hidden": 8}, (), {}, False)
    format = Format("fp8_block", (4, 4), "", ("F8_E4M3",), 1, "_scale_inv", ("F32",))
    none = np.zeros(1, np.int64)
    parts = (
        Part("values", "embed.weight", "F8_E4M3", (10, 8), (10, 8), none),
        Part("scale", "embed.weight_scale_inv", "F32", (3, 2), (3, 2), none),
    )
    dims = (parse_dim("tp(vocab)"), parse_dim("hidden"))
    parameter = Parameter("embed", None, None, "first", dims, format, parts, False)
    cutter = Cutter(model, {"vocab": "pad 4"})
    assert cutter.cut(parameter, {"tp": Share(1, 2)}).block == (1, 4)
    with pytest.raises(PlanError, match=r"embed.weight is quantised, so its dimension tp\(vocab\) can't be padded"):
        for rank in range(3):
            cutter.cut(parameter, {"tp": Share(rank, 3)})
