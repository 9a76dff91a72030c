"""The plan laid out again against the manifests: exchanges that both agree on, and losses in one replica."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from converter.check import check
from converter.restore import restore
from shard_plans.errors import OutputError
from shard_plans.placement.experts import ExpertPlacement
from tests.conftest import MakeCheckpoint
from tests.tools import tamper
from tests.tools.converted import bound, converted
from tests.tools.plans import make_plan

TENSOR = "layers.1.experts.gate_up"


@pytest.fixture
def output(tiny: MakeCheckpoint, tmp_path: Path) -> Path:
    """Two expert replicas that hold different experts, so that each has files of its own."""
    plan = make_plan(bound(tiny("mixtral")), {"tp": 4, "ep": 2, "etp": 1})
    apart = ExpertPlacement(((0, 1, 2, 3), (4, 5, 6, 7), (4, 5, 6, 7), (0, 1, 2, 3)))
    converted(tiny("mixtral"), tmp_path / "out", plan=replace(plan, experts=apart))
    return tmp_path / "out"


def reasons(output: Path, source: Path) -> list[tuple[str, str | None, str]]:
    found = check(output, deep=source)
    assert found.passed == (not found.failures)
    return [(failure.file, failure.tensor, failure.reason) for failure in found.failures]


def test_a_right_output_departs_nowhere(output: Path, tiny: MakeCheckpoint) -> None:
    assert reasons(output, tiny("mixtral")) == []


def test_halves_exchanged_in_data_and_manifest_alike(output: Path, tiny: MakeCheckpoint) -> None:
    """Every byte is where the manifest says, and comes back; only the plan knows that gate comes first."""
    file = "stage-0-edp-1-ep-0-etp-0.safetensors"
    tamper.swap_halves(output, file, TENSOR)
    with tamper.opened(output, file) as shard:
        gate, up = shard.entry(TENSOR)["sources"]
        gate["tensor"], up["tensor"] = up["tensor"], gate["tensor"]
    tamper.seal(output)
    found = reasons(output, tiny("mixtral"))
    assert [(where, tensor) for where, tensor, _ in found] == [(file, TENSOR)]
    assert "experts.{expert}.w3.weight, the plan takes" in found[0][2]


def test_experts_exchanged_in_data_and_manifest_alike(output: Path, tiny: MakeCheckpoint) -> None:
    file = "stage-0-edp-0-ep-1-etp-0.safetensors"
    tamper.swap_experts(output, file, TENSOR)
    with tamper.opened(output, file) as shard:
        for source in shard.entry(TENSOR)["sources"]:
            assert source["experts"] == "4-7"
            source["experts"] = "5,4,6-7"
    tamper.seal(output)
    assert any((where, tensor) == (file, TENSOR) for where, tensor, _ in reasons(output, tiny("mixtral")))


def test_a_tensor_lost_from_one_replica(output: Path, tiny: MakeCheckpoint) -> None:
    """The other replica still holds it, so no byte of the source is lost."""
    file = "stage-0-edp-1-ep-0-etp-0.safetensors"
    tamper.lose(output, file, "layers.2.experts.down")
    tamper.seal(output)
    assert (file, "layers.2.experts.down", "is lost: the plan places it there") in reasons(output, tiny("mixtral"))


def test_a_file_lost_from_one_replica(output: Path, tiny: MakeCheckpoint) -> None:
    file = "stage-0-edp-1-ep-1-etp-0.safetensors"

    def forget(root: dict) -> None:  # type: ignore[type-arg]
        root["files"] = [entry for entry in root["files"] if entry["name"] != file]
        for rank in root["ranks"]:
            rank["files"] = [name for name in rank["files"] if name != file]

    for name in (file, file.replace(".safetensors", ".json")):
        (output / name).unlink()
    tamper.seal(output, forget)
    assert any(file in where and "doesn't list it" in reason for where, _, reason in reasons(output, tiny("mixtral")))


def test_carried_files_and_their_division_are_the_checkpoints(own_tiny: MakeCheckpoint, tmp_path: Path) -> None:
    """Weights alone don't make a checkpoint: a new tokenizer under the same weights is another revision."""
    source, out = own_tiny("mixtral"), tmp_path / "out"
    (source / "tokenizer_config.json").write_text("{}")
    converted(source, out)
    (source / "tokenizer_config.json").write_text('{"changed": 1}')
    assert [(where, "has the digest" in words) for where, _, words in reasons(out, source)] == [
        ("source/tokenizer_config.json", True)
    ]
    with pytest.raises(OutputError, match=r"its bytes differ .*source/tokenizer_config.json"):
        converted(source, out)
    (source / "tokenizer_config.json").unlink()
    assert "the checkpoint has none" in reasons(out, source)[0][2]
    (source / "chat_template.jinja").write_text("x")
    assert len(reasons(out, source)) == 2


@pytest.mark.parametrize("name", ["plan.yaml", "stage-0-tp-0.safetensors", "stage-0-tp-0.json", "source/config.json"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(tiny: MakeCheckpoint, tmp_path: Path, name: str) -> None:
    converted(tiny("llama"), tmp_path / "out")
    (tmp_path / "out" / name).unlink()
    os.mkfifo(tmp_path / "out" / name)
    assert Path(name).name in " ".join(where for where, _, _ in reasons(tmp_path / "out", tiny("llama")))


def test_restore_keeps_out_of_the_output(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    converted(tiny("llama"), tmp_path / "out")
    for folder in (tmp_path / "out" / "source" / "x", tmp_path):
        with pytest.raises(OutputError, match="lie in one another"):
            restore(tmp_path / "out", folder)
