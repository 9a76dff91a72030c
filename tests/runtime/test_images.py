"""Images of an ids file: what is refused, and the way through the shards of a tiny Kimi K3 to the same logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime.checking.checks import AIM
from runtime.checking.reference import Reference
from runtime.generate import Generation
from runtime.inputs import check_images, choose_ids, choose_images
from runtime.request import RunOptions
from runtime.run import verify_and_run
from shard_plans.errors import RuntimeFault
from shard_plans.families.binding import Binding
from shard_plans.verbs import open_binding
from tests.checkpoints import cache, kimi_k3
from tests.checkpoints.store import read_tensors
from tests.tools import moonvit, tamper
from tests.tools.sharded import checks, convert_tiny, failed

HOLE = kimi_k3.PLACEHOLDER
GRID = ((1, 4, 6), (2, 2, 4))
IDS = [5, 9, *[HOLE] * 6, 17, *[HOLE] * 2, 44, 101, 7]
SEEN = [i for i, number in enumerate(IDS) if number == HOLE]


@pytest.fixture(scope="module")
def kimi(checkpoints: Path) -> Path:
    """The tiny checkpoint with a tower. Shared: never write into it."""
    return cache.made(checkpoints, "kimi_k3_vision", kimi_k3.make_kimi_k3)


@pytest.fixture(scope="module")
def binding(kimi: Path) -> Binding:
    return open_binding(kimi)


@pytest.fixture(scope="module")
def two_ranks(kimi: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output for tp 2. Shared: never write into it."""
    out = tmp_path_factory.mktemp("two") / "out"
    convert_tiny(kimi, out, {"tp": 2})
    return out


def tensors() -> dict[str, Tensor]:
    """An ids file's."""
    patches = sum(frames * rows * columns for frames, rows, columns in GRID)
    pixels = torch.randn((patches, 3, 14, 14), generator=torch.Generator().manual_seed(3))
    return {"input_ids": torch.tensor([IDS]), "pixel_values": pixels, "grid_thw": torch.tensor(GRID)}


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    path = tmp_path / "ids.safetensors"
    save_file(tensors(), path)
    return path


def test_the_reference_sees_what_the_oracle_sees(kimi: Path, binding: Binding, ids: Path) -> None:
    images = choose_images(str(ids), binding.model)
    assert images is not None
    assert images.grids == GRID
    with Reference(binding, torch.float64, torch.device("cpu")) as reference:
        x = reference.begin(torch.tensor(IDS), images).view(len(IDS), -1)
    stored = read_tensors(kimi)
    theirs = moonvit.see(stored, kimi_k3.CONFIG, images.pixels, GRID, torch.float64)
    assert torch.allclose(x[SEEN], theirs, rtol=0, atol=1e-12)
    words = [i for i in range(len(IDS)) if i not in SEEN]
    table = stored["language_model.model.embed_tokens.weight"].double()
    assert torch.equal(x[words], table[[IDS[i] for i in words]])


@pytest.mark.parametrize(
    "sizes",
    [{}, {"tp": 2}, {"tp": 2, "pp": 3}, {"dp": 2}, {"tp": 2, "dp": 2, "ep": 2, "etp": 2}],
    ids=lambda sizes: " ".join(f"{axis}{count}" for axis, count in sizes.items()) or "one",
)
def test_a_sharded_run_with_images_agrees_with_the_reference(
    sizes: dict[str, int], kimi: Path, ids: Path, tmp_path: Path
) -> None:
    convert_tiny(kimi, tmp_path / "out", sizes)
    result = verify_and_run(RunOptions(tmp_path / "out", kimi, input_ids=str(ids)))
    assert result.passed, result.checks
    assert result.figures["images"] == 2
    found = checks(result)
    assert list(found)[:4] == ["hashes", "bytes", "vision", "layers"]
    assert not any("vision tower" in sentence for sentence in result.not_checked)
    for name in ("vision", "layers", "hidden", "logits"):
        worst = found[name].worst
        assert worst is not None
        assert worst < AIM


def test_in_float64_and_in_bfloat16(two_ranks: Path, kimi: Path, ids: Path) -> None:
    result = verify_and_run(RunOptions(two_ranks, kimi, input_ids=str(ids), compute="float64"))
    assert result.passed
    assert all((check.worst or 0) < 1e-12 for check in result.checks)
    low = checks(verify_and_run(RunOptions(two_ranks, kimi, input_ids=str(ids), compute="bfloat16")))
    assert low["vision"].passed
    assert "smoke" in low["vision"].note


def zero(array: np.ndarray) -> np.ndarray:
    return np.zeros_like(array)


def test_a_wrong_tower_on_one_rank_is_named(kimi: Path, ids: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert_tiny(kimi, out, {"tp": 2, "pp": 2})
    tamper.change(out, "stage-0-tp-1.safetensors", "vision.1.qkv", zero)
    result = verify_and_run(RunOptions(out, kimi, input_ids=str(ids)))
    assert {"bytes", "vision"} <= failed(result)
    assert checks(result)["vision"].where.startswith("the tower's block 1, attn, rank 1, row ")
    assert checks(result)["layers"].passed  # fed with the reference's own input
    unseen = verify_and_run(RunOptions(out, kimi, input_ids="1,2,3"))
    assert failed(unseen) == {"bytes"}


def test_without_images_the_tower_is_not_loaded_and_the_report_says_so(two_ranks: Path, ids: Path) -> None:
    bare = verify_and_run(RunOptions(two_ranks, input_ids="1,2,3"))
    seen = verify_and_run(RunOptions(two_ranks, input_ids=str(ids)))
    stored = sum(t.nbytes for name, t in load_file(two_ranks / "stage-0-tp-0.safetensors").items() if "vision" in name)
    assert seen.figures["bytes_read"] - bare.figures["bytes_read"] == 2 * stored > 0
    assert "images" not in bare.figures
    assert any("tower was neither loaded nor run" in sentence for sentence in bare.not_checked)


def test_generation_goes_on_behind_images(two_ranks: Path, ids: Path, tmp_path: Path) -> None:
    result = verify_and_run(RunOptions(two_ranks, input_ids=str(ids), max_new_tokens=3, ignore_end=True))
    assert len(result.generated) == 3
    longer = tensors()
    longer["input_ids"] = torch.tensor([[*IDS, *result.generated[:2]]])
    path, logits = tmp_path / "longer.safetensors", tmp_path / "logits.safetensors"
    save_file(longer, path)
    verify_and_run(RunOptions(two_ranks, input_ids=str(path), logits_out=logits))
    assert load_file(logits)["logits"].argmax(-1).tolist()[-3:] == list(result.generated)


def test_a_placeholder_that_is_generated_is_a_token(
    two_ranks: Path, ids: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Generation, "_choose", lambda self, active: torch.full((len(active),), HOLE))
    result = verify_and_run(RunOptions(two_ranks, input_ids=str(ids), max_new_tokens=3, ignore_end=True))
    assert result.passed and result.generated == (HOLE,) * 3


def test_other_pixels_give_other_logits_from_their_token_on(two_ranks: Path, ids: Path, tmp_path: Path) -> None:
    other = tensors()
    other["pixel_values"][-1] += 1.0
    save_file(other, tmp_path / "other.safetensors")
    found = []
    for path in (ids, tmp_path / "other.safetensors"):
        verify_and_run(RunOptions(two_ranks, input_ids=str(path), logits_out=tmp_path / "logits.safetensors"))
        found.append(load_file(tmp_path / "logits.safetensors")["logits"])
    first = SEEN[6]  # of the second image, whose last patch was changed
    assert torch.allclose(found[0][:first], found[1][:first], atol=1e-5)
    assert not torch.allclose(found[0][first:], found[1][first:], atol=1e-3)


def without(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda found: found.__delitem__(name)


def put(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda found: found.__setitem__(name, tensor)


def not_finite(found: dict[str, Tensor]) -> None:
    found["pixel_values"][3, 0, 1, 2] = float("nan")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without("pixel_values"), "holds grid_thw but no pixel_values"),
        (without("grid_thw"), "holds pixel_values but no grid_thw"),
        (put("pixel_values", torch.zeros(40, 3, 14, 14, dtype=torch.float16)), r"float16 \[40, 3, 14, 14\], float32"),
        (put("pixel_values", torch.zeros(40, 3, 16, 16)), r"\[40, 3, 16, 16\], float32 \[patches, 3, 14, 14\]"),
        (put("pixel_values", torch.zeros(39, 3, 14, 14)), "holds 39 patches, grid_thw makes 40"),
        (not_finite, "1 of 23520 pixel_values aren't finite"),
        (put("grid_thw", torch.tensor([[1, 4, 6]], dtype=torch.int32)), r"int32 \[1, 3\], int64 \[images, 3\]"),
        (put("grid_thw", torch.tensor([[4, 6]])), r"int64 \[1, 2\], int64 \[images, 3\]"),
        (put("grid_thw", torch.zeros((0, 3), dtype=torch.int64)), r"\[0, 3\], int64 \[images, 3\]"),
        (put("grid_thw", torch.tensor([[1, 4, 6], [5, 2, 4]])), "image 1 has 5 x 2 x 4 patches; .* 1 to 4 frames"),
        (put("grid_thw", torch.tensor([[1, 3, 6]])), "a side is 3, and must be a multiple of 2"),
        (put("grid_thw", torch.tensor([[1, 2, 514]])), "a side is 514, .* at most 512"),
        (put("grid_thw", torch.tensor([[1, 0, 6]])), "a side is 0"),
        (put("input_ids", torch.tensor([[HOLE] * 7])), "7 token ids are the placeholder 500, the 2 images make 8 "),
        (put("input_ids", torch.tensor([[1, 2]])), "0 token ids are the placeholder 500, the 2 images make 8 "),
    ],
)
def test_images_that_do_not_fit(
    change: Callable[[dict[str, Tensor]], None], words: str, binding: Binding, tmp_path: Path
) -> None:
    found, path = tensors(), tmp_path / "ids.safetensors"
    change(found)
    save_file(found, path)
    with pytest.raises(RuntimeFault, match=words):
        check_images(choose_ids(None, str(path), None, binding.model), choose_images(str(path), binding.model),
                     binding.model)  # fmt: skip


def test_placeholders_need_images_and_images_a_tower(binding: Binding, ids: Path) -> None:
    model = binding.model
    with pytest.raises(RuntimeFault, match="2 token ids are the placeholder 500 of an image, and there are 0 images"):
        check_images([1, HOLE, HOLE], choose_images("1,500,500", model), model)
    check_images([1, 2], None, model)
    assert choose_images(None, model) is None
    text = replace(model, words={word: value for word, value in model.words.items() if word != "tower"})
    check_images([1, HOLE], None, text)
    with pytest.raises(RuntimeFault, match="kimi_k3 has no vision tower"):
        choose_images(str(ids), text)


def test_the_fixed_ids_are_never_placeholders(binding: Binding) -> None:
    drawn = choose_ids(None, None, None, binding.model)
    config: dict[str, Any] = {**binding.model.config, "media_placeholder_token_id": drawn[3]}
    again = choose_ids(None, None, None, replace(binding.model, config=config))
    assert drawn[3] not in again
    assert len(again) == len(drawn)
