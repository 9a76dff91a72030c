"""The vision tower compared step by step: what is named where a step is wrong, left out, or isn't the reference's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from runtime.blocks import clip, qwen_vision, towers, vision
from runtime.blocks.beside import Beside
from runtime.blocks.context import RankContext, single_rank
from runtime.blocks.images import Images
from runtime.blocks.weights import LayerWeights
from runtime.checking.checks import Measure
from runtime.checking.stored import StoredWeights
from runtime.checking.tower import (
    TowerRecorder,
    deep_measure,
    passes,
    placed_measure,
    places_measure,
    tower_measures,
)
from tests.conftest import MakeCheckpoint
from tests.runtime.test_towers import CPU, GRIDS, pixels
from tests.tools.converted import bound

BLOCKS = ["block 0, attn", "block 0, ffn", "block 1, attn", "block 1, ffn"]
STEPS = {
    "kimi_k25": ["patches", "positions", "turns", *BLOCKS, "norm", "merge", "projector"],
    "qwen3_vl_moe": [
        "patches", "positions", "turns", *BLOCKS[:2], "deep 0", *BLOCKS[2:], "deep 1", "projector"
    ],
    "minimax_m3_vl": ["patches", "norm", "turns", *BLOCKS, "projector", "merge"],
}  # fmt: skip
MODULES = {"kimi_k25": vision, "qwen3_vl_moe": qwen_vision, "minimax_m3_vl": clip}
TYPES = (torch.float32, torch.bfloat16)
Look = Callable[[], list[Measure]]


@pytest.fixture(params=[(name, compute) for name in GRIDS for compute in TYPES], ids=str)
def looked(request: pytest.FixtureRequest, tiny: MakeCheckpoint) -> tuple[str, torch.dtype, Look]:
    """The model, the type, and what looks again; the reference has looked by the right code."""
    name, compute = request.param
    ctx, weights, images, steps = seen(tiny(name), name, compute)
    return name, compute, lambda: list(tower_measures(ctx, weights, images, steps))


def seen(source: Path, name: str, compute: torch.dtype) -> tuple[RankContext, LayerWeights, Images, dict[str, Tensor]]:
    """A rank, the tower's weights, images, and what the steps of the reference made of them."""
    binding = bound(source)
    with torch.no_grad():
        stored = StoredWeights(binding)
        weights = stored.section("vision", CPU)
        stored.close()
    images, steps = Images(pixels(name), GRIDS[name]), dict[str, Tensor]()
    towers.look(single_rank(binding.model, torch.float32, CPU), weights, images, TowerRecorder(steps))
    return single_rank(binding.model, compute, CPU), weights, images, steps


def wrong(compute: torch.dtype, found: list[Measure]) -> list[str]:
    return [measure.where for measure in found if not passes(measure, compute)]


def test_every_step_is_seen_and_right(looked: tuple[str, torch.dtype, Look]) -> None:
    name, compute, look = looked
    found = look()
    assert [measure.where.split(", rank")[0] for measure in found] == [f"the tower's {step}" for step in STEPS[name]]
    assert [measure.order for measure in found] == list(range(len(found)))
    assert wrong(compute, found) == []


def test_one_wrong_step_spoils_no_other(looked: tuple[str, torch.dtype, Look], monkeypatch: pytest.MonkeyPatch) -> None:
    name, compute, look = looked
    right = vision.attention

    def reversed_block(*given: object) -> Tensor:
        y: Tensor = right(*given)  # type: ignore[arg-type]
        return y.flip(0) if given[3] == "vision.0" else y

    monkeypatch.setattr(MODULES[name], "attention", reversed_block)
    assert [where.split(", rank")[0] for where in wrong(compute, look())] == ["the tower's block 0, attn"]


def test_steps_that_are_left_out_or_not_the_references(tiny: MakeCheckpoint) -> None:
    ctx, weights, images, steps = seen(tiny("kimi_k25"), "kimi_k25", torch.float32)
    more = {**steps, "block 2, attn": steps["block 1, attn"]}
    assert wrong(ctx.compute, list(tower_measures(ctx, weights, images, more))) == [
        "the tower's block 2, attn, rank 0, not run"
    ]
    fewer = {name: x for name, x in steps.items() if name != "norm"}
    assert wrong(ctx.compute, list(tower_measures(ctx, weights, images, fewer))) == [
        "the tower's norm, rank 0, the reference has none"
    ]
    longer = {**steps, "merge": torch.cat([steps["merge"], steps["merge"][:1]])}
    assert wrong(ctx.compute, list(tower_measures(ctx, weights, images, longer)))[0].startswith("the tower's merge")


@pytest.mark.parametrize("compute", TYPES)
def test_what_comes_of_the_images(compute: torch.dtype, tiny: MakeCheckpoint) -> None:
    ctx = single_rank(bound(tiny("qwen3_vl_moe")).model, compute, CPU)
    stream, tokens = torch.randn((9, 64), generator=torch.Generator().manual_seed(1)), torch.tensor([2, 3, 4, 7])
    assert passes(placed_measure(ctx, tokens, stream, stream), compute)
    moved = placed_measure(replace(ctx, deals_images=True), tokens, stream.roll(1, 0), stream)
    assert not passes(moved, compute)
    if compute == torch.float32:
        assert "each step of the tower is right, but not how images are dealt to ranks, what" in moved.where
    deep = torch.randn((2, 4, 64), generator=torch.Generator().manual_seed(2))
    assert passes(deep_measure(ctx, "deep features, rank 0", deep, deep), compute)
    for other in (None, deep[:1], deep.flip(0), deep.flip(1)):
        assert not passes(deep_measure(ctx, "deep features, rank 0", other, deep), compute)
    beside = Beside(places=torch.arange(27).view(3, 9), tokens=tokens)
    assert places_measure(ctx, beside, beside) is None
    turned = places_measure(ctx, replace(beside, places=torch.arange(27).view(3, 9)[[0, 2, 1]]), beside)
    assert turned is not None and not passes(turned, compute)
    assert turned.where == "places of tokens, rank 0, token 0 of 9: [0, 18, 9], the reference has [0, 9, 18]"
    for spoiled in (replace(beside, tokens=tokens + 1), replace(beside, tokens=tokens[1:]), Beside()):
        measure = places_measure(ctx, spoiled, beside)
        assert measure is not None and not passes(measure, compute)
