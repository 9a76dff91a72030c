"""The deep check: conversions pass, and converter bugs are found though every digest is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from converter.check import check
from shard_plans.placement.experts import ExpertPlacement
from tests.conftest import MakeCheckpoint
from tests.tools import tamper
from tests.tools.converted import bound, converted
from tests.tools.plans import DENSE_PLANS, MOE_PLANS, make_plan, plan_id
from tests.tools.spoiled import Made, only

CELLS = [(name, sizes) for name in ("llama", "qwen2") for sizes in DENSE_PLANS]
CELLS += [(n, s) for n in ("mixtral_odd", "qwen3_moe_fp8", "deepseek_v3_mtp") for s in DENSE_PLANS + MOE_PLANS]


@pytest.mark.parametrize(
    ("name", "sizes"), CELLS, ids=lambda value: value if isinstance(value, str) else plan_id(value)
)
def test_a_conversion_passes(tiny: MakeCheckpoint, tmp_path: Path, name: str, sizes: dict[str, int]) -> None:
    for number, mtp in enumerate(("keep", "drop") if name == "deepseek_v3_mtp" else ("keep",)):
        result = converted(tiny(name), tmp_path / str(number), sizes, mtp)
        checked = check(tmp_path / str(number), tiny(name))
        assert checked.passed, checked.failures
        assert checked.tensors == result.tensors


@pytest.mark.parametrize("sizes", [{"tp": 3}, {"pp": 2}, {"tp": 3, "pp": 2}], ids=plan_id)
def test_odd_sizes_pass(tiny: MakeCheckpoint, tmp_path: Path, sizes: dict[str, int]) -> None:
    converted(tiny("llama_odd"), tmp_path, sizes)
    assert check(tmp_path, tiny("llama_odd")).failures == ()


def test_unequal_replicas_pass(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    plan = make_plan(bound(tiny("mixtral_odd")), {"dp": 4, "ep": 2, "etp": 1})
    slots = ((0, 1, 2, 4), (3, 4), (4, 3, 1), (0, 2, 1))
    converted(tiny("mixtral_odd"), tmp_path / "out", plan=replace(plan, experts=ExpertPlacement(slots)))
    result = check(tmp_path / "out", tiny("mixtral_odd"))
    assert result.passed, result.failures
    assert (tmp_path / "out" / "stage-0-edp-1-ep-0-etp-0.safetensors").exists()


@dataclass(frozen=True)
class Bug:
    """A fault of a converter: what it does to a tensor, and the words by which the deep check tells it."""

    spoil: Callable[[Path, str, str], None]
    tensor: str
    reason: str


BUGS = {
    "swapped experts": Bug(tamper.swap_experts, "experts.gate_up", r"model.layers.1.mlp.experts.0.gate_proj.weight"),
    "swapped expert scales": Bug(tamper.swap_experts, "experts.down.scale", "down_proj.weight_scale_inv"),
    "swapped gate and up": Bug(tamper.swap_halves, "shared.gate_up", "mlp.shared_experts.gate_proj.weight as stored"),
    "swapped gate and up of experts": Bug(tamper.swap_halves, "experts.gate_up", "gate_proj.weight (expert 0"),
    "a scale one block off": Bug(tamper.shift_rows, "attn.q_b.scale", "q_b_proj.weight_scale_inv as stored: row 0"),
    "rows one off": Bug(tamper.shift_rows, "attn.o", "self_attn.o_proj.weight as stored: row 0, column "),
    "padding": Bug(tamper.set_last, "embed", "its padding isn't zero, from row 127 on"),
}


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_a_converter_bug_is_found(tmp_path: Path, tiny: MakeCheckpoint, made: Made, bug: Bug) -> None:
    if bug.tensor == "embed":  # the one with a padded vocabulary
        made = Made(tiny("llama_odd"), tmp_path / "odd")
        converted(made.checkpoint, made.out, {"tp": 3})
    file, name = tamper.find(made.out, bug.tensor)[1 if bug.tensor == "embed" else 0]
    bug.spoil(made.out, file, name)
    assert made.shallow().passed, "all digests were made anew"
    result = made.deep()
    assert {(failure.file, failure.tensor) for failure in result.failures} == {(file, name)}
    assert any(bug.reason in failure.reason for failure in result.failures), result.failures


def test_a_lost_replica_is_found(made: Made) -> None:
    tamper.lose(made.out, "stage-0-tp-2.safetensors", "layers.1.attn.norm")
    where, what, reason = only(made.deep())
    assert (where, what) == ("stage-0-tp-2.safetensors", "layers.1.attn.norm")
    assert "other tp ranks of the stage hold it" in reason


def test_a_tensor_lost_everywhere_is_found(made: Made) -> None:
    for tp in range(4):
        tamper.lose(made.out, f"stage-0-tp-{tp}.safetensors", "layers.1.attn.norm")
    _, what, reason = only(made.deep())
    assert what == "model.layers.1.input_layernorm.weight"
    assert reason == "is in no shard, and not on the list of what was left out"


def test_experts_lost_everywhere_are_found(made: Made) -> None:
    for etp in range(2):
        for part in ("", ".scale"):
            tamper.lose(made.out, f"stage-0-ep-1-etp-{etp}.safetensors", f"layers.2.experts.down{part}")
    found = {failure.tensor for failure in made.deep().failures}
    assert found == {
        f"model.layers.2.mlp.experts.{e}.down_proj.weight{s}" for e in range(8, 16) for s in ("", "_scale_inv")
    }


def test_a_scale_without_values_is_found(made: Made) -> None:
    tamper.lose(made.out, "stage-0-tp-0.safetensors", "layers.1.attn.o")
    assert any("its values are missing" in failure.reason for failure in made.shallow().failures)


def edit_manifest(made: Made, file: str, tensor: str, edit: Callable[[dict[str, Any]], object]) -> None:
    with tamper.opened(made.out, file) as shard:
        edit(shard.entry(tensor))


def test_a_shard_that_covers_less_is_found(made: Made) -> None:
    """A rank that holds its neighbour's part, by its own manifest too: nobody holds its own."""
    for tensor in ("layers.1.attn.o", "layers.1.attn.o.scale"):
        with tamper.opened(made.out, "stage-0-tp-0.safetensors") as shard:
            own, data = shard.entry(tensor), dict(shard.data)
        with tamper.opened(made.out, "stage-0-tp-1.safetensors") as shard:
            shard.entry(tensor)["sources"] = own["sources"]
            shard.data[tensor] = data[tensor]
    assert made.shallow().passed
    found = {failure.tensor: failure.reason for failure in made.deep().failures}
    assert set(found) == {f"model.layers.1.self_attn.o_proj.weight{suffix}" for suffix in ("", "_scale_inv")}
    assert "row 0, column 32 and " in found["model.layers.1.self_attn.o_proj.weight"]


def test_a_scale_cut_by_another_rule_is_found(made: Made) -> None:
    def move(entry: dict[str, Any]) -> None:
        (start, stop), repeat = entry["sources"][0]["cuts"][0]["runs"][0], entry["sources"][0]["cuts"][0]["repeat"]
        entry["sources"][0]["cuts"][0]["runs"] = [[start + repeat, stop + repeat]]

    edit_manifest(made, "stage-0-tp-0.safetensors", "layers.1.attn.q_b.scale", move)
    assert any("whose scales of" in failure.reason for failure in made.shallow().failures)


def test_experts_that_the_plan_puts_elsewhere_are_found(made: Made) -> None:
    edit_manifest(
        made, "stage-0-ep-0-etp-0.safetensors", "layers.1.experts.down",
        lambda entry: entry["sources"][0].update(experts="8-15"),
    )  # fmt: skip
    reasons = [failure.reason for failure in made.shallow().failures]
    assert any("the plan says" in reason for reason in reasons)


def test_padding_elsewhere_than_in_a_vocabulary_is_found(made: Made) -> None:
    edit_manifest(
        made,
        "stage-0-tp-0.safetensors",
        "layers.1.attn.norm",
        lambda entry: entry["sources"][0]["cuts"][0].update(runs=[]),
    )
    assert any("only a vocabulary may be padded" in failure.reason for failure in made.shallow().failures)


def test_a_tensor_that_the_checkpoint_lacks_is_found(made: Made) -> None:
    edit_manifest(
        made, "stage-0-tp-0.safetensors", "norm", lambda entry: entry["sources"][0].update(tensor="model.final.weight")
    )
    assert made.shallow().passed
    assert "claims to hold model.final.weight, which the checkpoint lacks" in only(made.deep())[2]


def test_a_false_skip_list_is_found(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    made = Made(tiny("deepseek_v3_mtp"), tmp_path)
    converted(made.checkpoint, made.out, mtp="drop")
    tamper.seal(made.out, lambda root: root["skipped"][0].update(count=7))
    assert "is listed as left out with 7 tensors" in only(made.deep())[2]
    tamper.seal(made.out, lambda root: root["skipped"].pop(0))
    assert "not on the list of what was left out" in only(made.deep())[2]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda root: root.update(family="llama"), "is of the checkpoint ('llama'"),
        (lambda root: root["source"].update(tensors=1), "its plan of deepseek_v3"),
        (lambda root: root["source"]["files"][0].update(size=10), "has 10 bytes, or another header than it has"),
        (lambda root: root["source"]["files"].pop(), "the header of the source's file is None"),
        (lambda root: root["ranks"].pop(), "lists 3 ranks, which aren't the 4 that the plan and it ask for"),
        (lambda root: root["ranks"][0]["files"].pop(), "of its place are"),
    ],
)
def test_a_false_root_is_found(made: Made, change: Callable[[dict[str, Any]], object], reason: str) -> None:
    tamper.seal(made.out, change)
    assert any(reason in failure.reason for failure in made.deep().failures), made.deep().failures
