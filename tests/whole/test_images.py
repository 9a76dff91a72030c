"""Images in a prompt: what the ranks answer is what transformers answers, whatever the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime.blocks.images import Images
from runtime.request import RunOptions
from runtime.run import verify_and_run
from tests.conftest import MakeCheckpoint
from tests.converter.test_architectures import PLANS, QUICK
from tests.tools.plans import plan_id
from tests.tools.sharded import convert_tiny, expected, relative, run_output

NAMES = ("kimi_k25", "qwen3_vl_moe", "minimax_m3_vl", "qwen3_5_moe")
LIMIT = 1e-5
FAST = (QUICK[0], len(PLANS) - 1)
"""Two ranks of one stage, and three stages, the second of which adds features of the images."""
CELLS = [
    pytest.param(name, number, id=f"{name} {plan_id(plan)}", marks=[] if number in FAST else pytest.mark.slow)
    for name in NAMES
    for number, plan in enumerate(PLANS)
]


def run(
    source: Path, folder: Path, plan: dict[str, int], new_tokens: int = 0, vision: str = "replicated",
    compute: str = "float32",
) -> tuple[Tensor, Any]:  # fmt: skip
    """The logits of the reference's own image and ids, and all that verify-and-run found."""
    reference, ids = expected(source), folder / "ids.safetensors"
    convert_tiny(source, folder / "out", plan)
    given = {"input_ids": "input_ids", "pixel_values": "pixel_values", "grid_thw": "image_grid_thw"}
    save_file({name: reference[f"vision.{theirs}"] for name, theirs in given.items()}, ids)
    logits = folder / "logits.safetensors"
    found = verify_and_run(
        RunOptions(
            folder / "out",
            source,
            input_ids=str(ids),
            logits_out=logits,
            max_new_tokens=new_tokens,
            vision=vision,
            compute=compute,
        )
    )
    return load_file(logits)["logits"], found


@pytest.mark.parametrize(("name", "number"), CELLS)
def test_logits_with_an_image(name: str, number: int, tiny: MakeCheckpoint, tmp_path: Path) -> None:
    source = tiny(name)
    logits, found = run(source, tmp_path, PLANS[number])
    assert found.passed, found.checks
    assert relative(logits, expected(source)["vision.logits"][0]) < LIMIT
    assert relative(logits, expected(source)["logits"][0]) > 0.1  # without the image it would be another answer


@pytest.mark.parametrize("vision", ["replicated", "data-parallel"])
def test_images_in_low_precision_over_stages(vision: str, tiny: MakeCheckpoint, tmp_path: Path) -> None:
    """The second stage adds features of the images, which came over in the ranks' own type."""
    _, found = run(tiny("qwen3_vl_moe"), tmp_path, {"tp": 2, "pp": 3}, vision=vision, compute="bfloat16")
    found_vision = next(check for check in found.checks if check.name == "vision")
    assert found_vision.passed and found_vision.worst > 0.999
    assert any("takes ids without images" in said for said in found.not_checked)


def test_the_tower_data_parallel(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    source = tiny("kimi_k25")
    logits, found = run(source, tmp_path, {"tp": 2}, vision="data-parallel")
    assert found.passed, found.checks
    assert relative(logits, expected(source)["vision.logits"][0]) < LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_what_is_generated_behind_an_image(name: str, tiny: MakeCheckpoint, tmp_path: Path) -> None:
    """Places behind an image go on from its longer side, also token by token through the cache."""
    from tests.checkpoints.tiny import quiet, reload

    source, new = tiny(name), 4
    _, found = run(source, tmp_path, {"pp": 3}, new)
    quiet()
    reference, model = expected(source), reload(name, source)
    ids = reference["vision.input_ids"]
    for _ in range(new):
        inputs = {
            "pixel_values": reference["vision.pixel_values"],
            "image_grid_thw": reference["vision.image_grid_thw"],
        }
        if name in ("qwen3_vl_moe", "qwen3_5_moe"):
            inputs["mm_token_type_ids"] = (ids == 250).int()
        with torch.no_grad():
            scores = model(input_ids=ids, use_cache=False, **inputs).logits[0, -1]
        ids = torch.cat([ids, scores.argmax()[None, None]], dim=1)
    assert list(found.generated) == ids[0, -new:].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_hidden_state_with_an_image(name: str, tiny: MakeCheckpoint, tmp_path: Path) -> None:
    """What early layers add of the image included; the output of the last layer is seen in the logits."""
    source, reference = tiny(name), expected(tiny(name))
    wanted = streams(name, source)
    rows, columns = reference["vision.image_grid_thw"][0, 1:].tolist()
    images = Images(reference["vision.pixel_values"], ((1, rows, columns),))
    for plan in PLANS:
        convert_tiny(source, tmp_path / plan_id(plan), plan)
        found = run_output(tmp_path / plan_id(plan), reference["vision.input_ids"][0], images=images)
        assert all(relative(scores, reference["vision.logits"][0]) < LIMIT for scores in found.logits)
        for watch in found.watches:
            for layer, hidden in watch.hidden.items():
                if layer + 1 < len(wanted):
                    assert relative(hidden, wanted[layer + 1]) < LIMIT, (plan, layer)


def streams(name: str, source: Path) -> list[Tensor]:
    """What goes into each layer of transformers' model [tokens, hidden], for the reference's image and ids."""
    from tests.checkpoints.tiny import quiet, reload

    quiet()
    reference, model, found = expected(source), reload(name, source), list[Tensor]()
    inputs = {key.removeprefix("vision."): value for key, value in reference.items() if key.startswith("vision.")}
    del inputs["logits"]
    layers = [module for module in model.modules() if type(module).__name__.endswith("DecoderLayer")]
    for layer in layers:
        layer.register_forward_pre_hook(
            lambda _, given, named: found.append((given or (named["hidden_states"],))[0][0].float()), with_kwargs=True
        )
    with torch.no_grad():
        model(**inputs, use_cache=False)
    assert len(found) == len(layers) == 3
    return found
