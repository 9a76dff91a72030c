"""Vision towers and the places of images against transformers' own, with images of several shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.blocks import clip, projector, qwen_vision, towers, vision
from runtime.blocks.context import RankContext, single_rank
from runtime.blocks.dealt_images import deal
from runtime.blocks.images import Grid3, Images, read_tower
from runtime.blocks.places import beside_images, find_places, shift
from runtime.checking.stored import StoredWeights
from runtime.comm.comm import Comm
from runtime.comm.virtual import VirtualWorld
from shard_plans.errors import RuntimeFault
from shard_plans.families.model import Model
from shard_plans.placement.experts import ExpertPlacement
from shard_plans.placement.grid import Grid
from tests.conftest import MakeCheckpoint
from tests.tools.converted import bound

CPU = torch.device("cpu")
GRIDS = {
    "kimi_k25": ((1, 4, 6), (3, 8, 2), (1, 10, 8)),  # smaller than the table of 8 x 8, and larger; with frames
    "qwen3_vl_moe": ((1, 4, 6), (1, 8, 2), (1, 10, 8)),
    "minimax_m3_vl": ((1, 4, 6), (2, 8, 2), (1, 10, 8)),
}
LIMIT = 2e-6


def pixels(name: str, grids: Sequence[Grid3] | None = None) -> Tensor:
    patches = sum(math.prod(grid) for grid in grids or GRIDS[name])
    shape = {"kimi_k25": (3, 14, 14), "qwen3_vl_moe": (3 * 2 * 16 * 16,), "minimax_m3_vl": (3 * 2 * 14 * 14,)}[name]
    return torch.randn((patches, *shape), generator=torch.Generator().manual_seed(4))


@pytest.fixture(scope="module")
def theirs(tiny: MakeCheckpoint) -> Callable[[str], Any]:
    """Name -> transformers' model; made once."""
    from tests.checkpoints.tiny import quiet, reload

    quiet()
    models: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in models:
            models[name] = reload(name, tiny(name)).model
        return models[name]

    return get


def see(tiny: MakeCheckpoint, name: str, grids: tuple[Grid3, ...] = ()) -> tuple[Tensor, Tensor | None]:
    """What our tower makes of the images."""
    binding = bound(tiny(name))
    weights = StoredWeights(binding)
    found = towers.look(
        single_rank(binding.model, torch.float32, CPU), weights.section("vision", CPU),
        Images(pixels(name, grids), grids or GRIDS[name]),
    )  # fmt: skip
    weights.close()
    return found


def errors(tiny: MakeCheckpoint, theirs: Callable[[str], Any], name: str) -> list[float]:
    """Of the tokens, then of each deeper feature: the worst relative error of a token."""
    with torch.no_grad():
        expected = theirs(name).get_image_features(pixels(name), torch.tensor(GRIDS[name]))
    ours, deep = see(tiny, name)
    pairs = [(ours, torch.cat(list(expected.pooler_output)))]
    if deep is not None:
        features = [torch.cat(list(found)) for found in expected.deepstack_features]
        assert len(deep) == len(features)
        pairs += list(zip(deep, features, strict=True))
    return [float(((a - b).norm(dim=-1) / b.norm(dim=-1)).max()) for a, b in pairs]


@pytest.mark.parametrize("name", GRIDS)
def test_a_tower_is_what_transformers_computes(name: str, tiny: MakeCheckpoint, theirs: Callable[[str], Any]) -> None:
    found = errors(tiny, theirs, name)
    assert len(found) == (3 if name == "qwen3_vl_moe" else 1)
    assert max(found) < LIMIT


RESIZE, TURNS, CLIP_TURNS = vision.resize, vision.turns, clip.turns
MISTAKES: dict[str, tuple[str, Any, str, Any]] = {
    "linear for cubic": (
        "kimi_k25", vision, "resize", lambda table, rows, columns, mode, corners: RESIZE(
            table, rows, columns, "bilinear", corners),
    ),
    "corners moved": (
        "qwen3_vl_moe", qwen_vision, "resize", lambda table, rows, columns, mode, corners: RESIZE(
            table, rows, columns, mode, False),
    ),
    "row after row": ("qwen3_vl_moe", qwen_vision, "in_squares", lambda tower, x: x.flatten(0, 1)),
    "rows and columns swapped": (
        "kimi_k25", vision, "turns", lambda images, *rest: TURNS(
            replace(images, grids=tuple((t, w, h) for t, h, w in images.grids)), *rest),
    ),
    "no frames": (
        "minimax_m3_vl", clip, "turns", lambda ctx, tower, images: CLIP_TURNS(
            ctx, tower, replace(images, grids=tuple((1, t * h, w) for t, h, w in images.grids))),
    ),
    "another axis": ("minimax_m3_vl", clip, "BASE", 1000.0),
    "eps of the norms": ("kimi_k25", vision, "LAYER_EPS", 1e-2),
    "no norm before the projector": ("kimi_k25", projector, "biased_norm", lambda ctx, weights, role, x, eps: x),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_shows(
    mistake: str, tiny: MakeCheckpoint, theirs: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, module, attribute, wrong = MISTAKES[mistake]
    monkeypatch.setattr(module, attribute, wrong)
    try:
        found = errors(tiny, theirs, name)
    except RuntimeFault:  # a weight that nothing reads
        return
    assert max(found) > 1e-4


def two_images(model: Model, placeholder: int) -> tuple[Tensor, Images]:
    """Text, an image of 2 x 3 tokens, text, one of 4 x 1, text."""
    ids = [7, 8, 9, *[placeholder] * 6, 10, 11, *[placeholder] * 4, 12, 13, 14]
    return torch.tensor(ids), Images(torch.zeros(0), ((1, 4, 6), (1, 8, 2)))


def test_places_are_transformers_own(tiny: MakeCheckpoint, theirs: Callable[[str], Any]) -> None:
    model = bound(tiny("qwen3_vl_moe")).model
    ids, images = two_images(model, 250)
    expected, delta = theirs("qwen3_vl_moe").get_rope_index(
        ids[None], mm_token_type_ids=(ids == 250).int()[None], image_grid_thw=torch.tensor(images.grids)
    )
    assert torch.equal(find_places(model, ids, images), expected[:, 0])
    beside = beside_images(model, ids, images)
    assert shift(beside) == int(delta) != 0
    assert beside.tokens is not None and beside.tokens.tolist() == [3, 4, 5, 6, 7, 8, 11, 12, 13, 14]
    assert beside_images(model, ids, None).places is None and shift(beside_images(model, ids, None)) == 0


def test_a_placeholder_without_an_image_is_refused(tiny: MakeCheckpoint) -> None:
    model = bound(tiny("qwen3_vl_moe")).model
    ids, images = two_images(model, 250)
    with pytest.raises(RuntimeFault, match="token 11 stands for a piece of an image, and there is none left"):
        find_places(model, ids, replace(images, grids=images.grids[:1]))


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "kimi_k25"])
def test_a_placeholder_that_was_generated_is_a_word(name: str, tiny: MakeCheckpoint) -> None:
    model = bound(tiny(name)).model
    ids, images = two_images(model, 250)
    alone, longer = beside_images(model, ids, images), torch.cat([ids, torch.tensor([250, 7])])
    beside = beside_images(model, longer, images, len(ids))
    assert beside.tokens is not None and alone.tokens is not None and torch.equal(beside.tokens, alone.tokens)
    if alone.places is not None and beside.places is not None:
        assert torch.equal(beside.places[:, :-2], alone.places)
        assert beside.places[:, -2:].tolist() == [[len(longer) - 2 + shift(alone), len(longer) - 1 + shift(alone)]] * 3


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_that_look_at_some_images_each(tiny: MakeCheckpoint, name: str, tp: int) -> None:
    """Four ranks are more than there are images."""
    binding, grid = bound(tiny(name)), Grid(tp=tp)
    weights = StoredWeights(binding)
    frames = read_tower(binding.model).frames
    grids = tuple((min(frames, count), rows, columns) for count, rows, columns in GRIDS[name])
    images = Images(pixels(name, grids), grids)
    alone, alone_deep = see(tiny, name, grids)

    def rank(comm: Comm) -> tuple[Tensor, Tensor | None]:
        at, nobody = grid.coordinate(comm.rank), ExpertPlacement(())
        ctx = RankContext(grid, at, comm, binding.model, nobody, torch.float32, CPU, deals_images=True)
        return towers.look(ctx, weights.section("vision", CPU), images)

    for x, deep in VirtualWorld(tp).run(rank):
        assert torch.allclose(x, alone, rtol=LIMIT, atol=LIMIT)
        assert (deep is None) == (alone_deep is None)
        assert deep is None or alone_deep is None or torch.allclose(deep, alone_deep, rtol=LIMIT, atol=LIMIT)
    weights.close()


def test_images_are_dealt_by_size() -> None:
    grids = [(1, 2, 2), (1, 8, 8), (1, 4, 4), (1, 6, 6)]
    assert deal(grids, 2) == [[1], [0, 2, 3]]
    assert deal(grids[:1], 3) == [[0], [], []]
