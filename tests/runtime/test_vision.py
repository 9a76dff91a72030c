"""The vision tower against an oracle written again, against transformers' MoonViT, and with mistakes that must show."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from runtime.blocks import towers, vision
from runtime.blocks.context import RankContext, single_rank
from runtime.blocks.images import Images, read_tower, token_count
from runtime.blocks.weights import Stored
from shard_plans.errors import RuntimeFault
from shard_plans.families.model import Model
from tests.checkpoints import kimi_k3
from tests.tools import moonvit

CPU = torch.device("cpu")
GRID = ((1, 4, 6), (3, 8, 6), (1, 14, 4), (2, 2, 2))
"""Smaller than the table of 8 x 6, as large, larger on one side; with and without frames."""


def make_model(config: Mapping[str, Any] = kimi_k3.CONFIG) -> Model:
    """The tower's part of the model, without the family table."""
    seen = config["vision_config"]
    sizes = {
        "hidden": 128, "vocab": 512, "vt": seen["vt_hidden_size"], "vt_qkv": seen["qkv_hidden_size"],
        "vt_ffn": seen["vt_intermediate_size"], "vt_count": seen["vt_num_hidden_layers"], "patch": seen["patch_size"],
        "vt_h": seen["init_pos_emb_height"], "vt_w": seen["init_pos_emb_width"], "merge": 4,
    }  # fmt: skip
    return Model("kimi_k3", config, config, sizes, (), {"tower": "moonvit3d"}, False)


def changed(**values: Any) -> dict[str, Any]:
    """The configuration with other values in vision_config."""
    return {**kimi_k3.CONFIG, "vision_config": {**kimi_k3.VISION, **values}}


@pytest.fixture(scope="module")
def stored() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(5)
    return dict(kimi_k3.tower(random)) | dict(kimi_k3.projector(random))


def native(stored: Mapping[str, Tensor]) -> dict[str, Stored]:
    """Stored names to native ones, written out again."""
    roles = {
        "vision_tower.patch_embed.proj": "vision.patch", "vision_tower.patch_embed.pos_emb": "vision.pos",
        "vision_tower.encoder.final_layernorm": "vision.norm", "mm_projector.proj.0": "vision.merge0",
        "mm_projector.proj.2": "vision.merge2", "mm_projector.post_norm": "vision.merge_norm",
    }  # fmt: skip
    inner = {"norm0": "norm0", "wqkv": "qkv", "wo": "o", "norm1": "norm1", "mlp.fc0": "fc0", "mlp.fc1": "fc1"}
    found = {}
    for name, tensor in stored.items():
        stem = name.removesuffix(".weight")
        if stem not in roles:
            number, _, part = stem.removeprefix("vision_tower.encoder.blocks.").partition(".")
            found[f"vision.{number}.{inner[part]}"] = Stored(tensor)
        else:
            found[roles[stem]] = Stored(tensor)
    return found


def pictures(grid: tuple[tuple[int, int, int], ...] = GRID, side: int = 14) -> Images:
    patches = sum(math.prod(image) for image in grid)
    return Images(torch.randn((patches, 3, side, side), generator=torch.Generator().manual_seed(9)), grid)


def context(dtype: torch.dtype, model: Model | None = None) -> RankContext:
    return single_rank(model or make_model(), dtype, CPU)


def error(ours: Tensor, theirs: Tensor) -> float:
    """Worst relative error of a token."""
    ours, theirs = ours.double(), theirs.double()
    return float(((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max())


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 6e-2)])
def test_the_tower_is_what_the_oracle_computes(dtype: torch.dtype, limit: float, stored: dict[str, Tensor]) -> None:
    images = pictures()
    ours = towers.look(context(dtype), native(stored), images)[0]
    theirs = moonvit.see(stored, kimi_k3.CONFIG, images.pixels, GRID, torch.float64)
    assert ours.dtype == dtype
    assert ours.shape == (token_count(GRID, (2, 2)), 128) == (6 + 12 + 14 + 1, 128)
    assert error(ours, theirs) < limit


@pytest.mark.parametrize("mistake", moonvit.MISTAKES)
def test_each_mistake_shows(mistake: str, stored: dict[str, Tensor]) -> None:
    images = pictures()
    ours = towers.look(context(torch.float64), native(stored), images)[0]
    wrong = moonvit.see(stored, kimi_k3.CONFIG, images.pixels, GRID, torch.float64, mistake)
    assert error(ours, wrong) > (1e-6 if mistake == "eps of the text" else 1e-4)


def test_images_do_not_see_each_other_and_their_order_is_kept(stored: dict[str, Tensor]) -> None:
    weights, ctx, images = native(stored), context(torch.float64), pictures()
    whole, start, row = towers.look(ctx, weights, images)[0], 0, 0
    for image in GRID:
        patches, tokens = math.prod(image), token_count((image,), (2, 2))
        alone = towers.look(ctx, weights, Images(images.pixels[start : start + patches], (image,)))[0]
        assert error(whole[row : row + tokens], alone) < 1e-13
        start, row = start + patches, row + tokens


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("length", [1, 2, 5, 8, 9, 16, 31])
def test_the_table_is_stretched_as_torch_does(length: int, dtype: torch.dtype) -> None:
    table = torch.randn((8, 3), generator=torch.Generator().manual_seed(1)).to(dtype)
    theirs = functional.interpolate(table.T[None], length, mode="linear", align_corners=False)[0].T
    assert torch.allclose(vision.stretch(table, length, 0), theirs, rtol=0, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_norm_without_eps_takes_the_epsilon_of_what_it_accumulates_in(dtype: torch.dtype) -> None:
    x = torch.full((1, 64), 1e-4, dtype=dtype)
    theirs = functional.rms_norm(x.double() if dtype == torch.float64 else x.float(), (64,))
    eps = torch.finfo(context(dtype).accumulate()).eps
    ours = x.double() / (x.double().pow(2) + eps).sqrt()
    assert torch.allclose(ours, theirs.double(), rtol=1e-6)
    if dtype == torch.bfloat16 and tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 7):
        assert torch.allclose(functional.rms_norm(x, (64,)).double(), ours, rtol=2**-8)


def test_transformers_moonvit_with_k3s_norms_computes_the_same() -> None:
    """Kimi K2.5's tower in transformers differs by norms, biases, interpolation and the width of qkv: made alike."""
    module = pytest.importorskip("transformers.models.kimi_k25.modeling_kimi_k25")
    sizes = {**kimi_k3.VISION, "vt_hidden_size": 48, "init_pos_emb_width": 8}
    model = make_model({**kimi_k3.CONFIG, "vision_config": sizes})
    random = torch.Generator().manual_seed(2)
    stored = dict(kimi_k3.tower(random, sizes))
    theirs = as_transformers(module, stored, sizes)
    images, ctx = pictures(), context(torch.float64, model)
    with torch.no_grad():
        # its buffers are float32, hence the limit
        merged = theirs(images.pixels.double(), torch.tensor(GRID)).pooler_output.flatten(1)
    tower = read_tower(model)
    ours = vision.merge(tower, vision.look_at_patches(ctx, tower, native(stored), images), images)
    assert error(ours, merged) < 1e-6


def as_transformers(module: Any, stored: Mapping[str, Tensor], sizes: Mapping[str, Any]) -> Any:
    """The tower of transformers, with RMSNorm, no biases, a bilinear table, and these weights in its own layout."""
    width, heads = sizes["vt_hidden_size"], sizes["vt_num_attention_heads"]
    config = module.Kimi_K25VisionConfig(
        hidden_size=width, num_attention_heads=heads, num_hidden_layers=sizes["vt_num_hidden_layers"],
        intermediate_size=sizes["vt_intermediate_size"], pos_emb_height=8, pos_emb_width=8, attn_implementation="eager",
    )  # fmt: skip
    theirs = module.Kimi_K25VisionModel(config).double()
    theirs.patch_embed.pos_emb.interpolation_mode = "bilinear"
    for layer in theirs.layers:
        layer.norm1, layer.norm2 = torch.nn.RMSNorm(width), torch.nn.RMSNorm(width)
    theirs.final_layernorm = torch.nn.RMSNorm(width)
    halves = torch.cat([torch.arange(0, width // heads, 2), torch.arange(1, width // heads, 2)])

    def halved(rows: Tensor) -> Tensor:
        return rows.view(heads, -1, width)[:, halves].reshape(width, width)

    named = {name.removeprefix("vision_tower.").removesuffix(".weight"): tensor for name, tensor in stored.items()}
    weights = {
        "patch_embed.proj.weight": named["patch_embed.proj"],
        "patch_embed.pos_emb.position_embeddings": named["patch_embed.pos_emb"],
        "final_layernorm.weight": named["encoder.final_layernorm"],
    }
    for number in range(sizes["vt_num_hidden_layers"]):
        ours, layer = f"encoder.blocks.{number}", f"layers.{number}"
        q, k, v = named[f"{ours}.wqkv"].chunk(3)
        weights |= {
            f"{layer}.norm1.weight": named[f"{ours}.norm0"], f"{layer}.norm2.weight": named[f"{ours}.norm1"],
            f"{layer}.attn.q_proj.weight": halved(q), f"{layer}.attn.k_proj.weight": halved(k),
            f"{layer}.attn.v_proj.weight": v, f"{layer}.attn.proj.weight": named[f"{ours}.wo"],
            f"{layer}.mlp.fc1.weight": named[f"{ours}.mlp.fc0"], f"{layer}.mlp.fc2.weight": named[f"{ours}.mlp.fc1"],
        }  # fmt: skip
    biases = {name: torch.zeros_like(tensor) for name, tensor in theirs.state_dict().items() if name.endswith(".bias")}
    theirs.double().load_state_dict(weights | biases)
    return theirs


def test_what_the_images_become_belongs_to_the_placeholders_in_order(stored: dict[str, Tensor]) -> None:
    images, weights, ctx = pictures(((1, 2, 4), (1, 2, 2))), native(stored), context(torch.float64)
    hole = kimi_k3.PLACEHOLDER
    tokens, vectors = towers.see(ctx, weights, images, torch.tensor([7, hole, hole, 8, hole, 9]))
    assert tokens.tolist() == [1, 2, 4]
    assert torch.equal(vectors, towers.look(ctx, weights, images)[0])
    with pytest.raises(RuntimeFault, match="2 token ids are the placeholder 500, the images make 3 tokens"):
        towers.see(ctx, weights, images, torch.tensor([7, hole, hole]))


def test_a_weight_that_is_missing_unread_or_of_another_width(stored: dict[str, Tensor]) -> None:
    weights, ctx, images = native(stored), context(torch.float32), pictures()
    lost = {name: weight for name, weight in weights.items() if name != "vision.1.o"}
    with pytest.raises(RuntimeFault, match=r"vision tower: the weight vision\.1\.o is missing"):
        towers.look(ctx, lost, images)
    with pytest.raises(RuntimeFault, match=r"no block reads vision\.3\.o"):
        towers.look(ctx, weights | {"vision.3.o": weights["vision.1.o"]}, images)
    with pytest.raises(RuntimeFault, match=r"vision\.2\.fc1 is \[24, 39\].* width 40"):
        towers.look(ctx, weights | {"vision.2.fc1": Stored(weights["vision.2.fc1"].values[:, 1:])}, images)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"norm_type": "layernorm"}, "norm_type is 'layernorm'.*'rmsnorm'"),
        ({"pos_emb_interpolation_mode": "bicubic"}, "bicubic"),
        ({"activation_func": "gelu"}, "activation_func"),
        ({"mm_projector_type": "patchmerger"}, "patchmerger"),
        ({"linear_bias": True}, "linear_bias is True"),
        ({"merge_kernel_size": [2]}, "merge_kernel_size"),
        ({"vt_num_attention_heads": 5}, "gives 5 heads a width of 9.6"),
        ({"projector_ln_eps": 0}, "projector_ln_eps"),
        ({"init_pos_emb_time": None}, "init_pos_emb_time"),
    ],
)
def test_a_tower_that_these_blocks_do_not_compute_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(RuntimeFault, match=words):
        read_tower(make_model(changed(**values)))


def test_a_model_without_a_tower_or_a_placeholder() -> None:
    with pytest.raises(RuntimeFault, match="no vision tower"):
        read_tower(replace(make_model(), words={}))
    with pytest.raises(RuntimeFault, match="media_placeholder_token_id is 512"):
        read_tower(make_model({**kimi_k3.CONFIG, "media_placeholder_token_id": 512}))
