"""Outputs that can't be made into others: damaged, unfinished, in part, without what is wanted."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from converter.check import check
from converter.sources.proof import ProvingReader
from converter.verbs import convert, restore
from shard_plans.documents.manifest import ROOT
from shard_plans.documents.plan import write_plan
from shard_plans.errors import CheckFailed, CheckpointError, ManifestError, OutputError, PlanError, ReshardError
from tests.conftest import MakeCheckpoint
from tests.tools import crash, tamper
from tests.tools.cli import RunCli
from tests.tools.converted import bound, contents, converted
from tests.tools.plans import make_plan

NAME = "deepseek_v3_mtp"
FIRST, SECOND = {"tp": 4, "ep": 2, "etp": 2}, {"pp": 2, "tp": 2, "ep": 2}


def test_damage_is_named_and_never_taken_over(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    converted(tiny(NAME), tmp_path / "one", FIRST)
    dice, found = random.Random(1), 0
    files = sorted(path.name for path in (tmp_path / "one").glob("*.safetensors"))
    for number in range(24):
        file = dice.choice(files)
        tensor = dice.choice([name for held, name in tamper.find(tmp_path / "one", "") if held == file])
        start, size = tamper.tensor_offset(tmp_path / "one", file, tensor)
        place, bit = start + dice.randrange(size), dice.randrange(8)
        tamper.flip(tmp_path / "one" / file, place, bit)
        out = tmp_path / str(number)
        try:
            converted(tmp_path / "one", out, SECOND, workers=dice.choice([1, 4]))
            assert check(out, deep=tiny(NAME)).passed  # another replica was read
        except CheckFailed as error:
            assert f"{tmp_path / 'one' / file} is damaged, so nothing is made of it: {tensor}, chunk 0" in str(error)
            assert not (out / ROOT).exists()
            found += 1
        tamper.flip(tmp_path / "one" / file, place, bit)
    assert found > 8


def test_without_proof_damage_is_taken_over(
    tiny: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control."""
    converted(tiny("llama"), tmp_path / "one", {"tp": 2})
    file, tensor = tamper.find(tmp_path / "one", "layers.0.mlp.down")[1]
    tamper.flip(tmp_path / "one" / file, tamper.tensor_offset(tmp_path / "one", file, tensor)[0])
    with pytest.raises(CheckFailed, match=r"stage-0-tp-1.safetensors is damaged"):
        converted(tmp_path / "one", tmp_path / "two")

    def believe(self: ProvingReader, number: int, _: object) -> None:
        self.proven[number] = 1
        del self._open[number]

    monkeypatch.setattr(ProvingReader, "_compare", believe)
    converted(tmp_path / "one", tmp_path / "two")
    assert not check(tmp_path / "two", deep=tiny("llama")).passed


def test_after_a_repair_it_goes_on(tiny: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crash.many_units(monkeypatch)
    converted(tiny("llama"), tmp_path / "one", {"tp": 2})
    converted(tiny("llama"), tmp_path / "direct", {"pp": 3})
    file, tensor = tamper.find(tmp_path / "one", "layers.2.mlp.down")[0]
    place = tamper.tensor_offset(tmp_path / "one", file, tensor)[0]
    tamper.flip(tmp_path / "one" / file, place)
    with pytest.raises(CheckFailed, match=tensor):
        converted(tmp_path / "one", tmp_path / "two", {"pp": 3}, workers=1)
    tamper.flip(tmp_path / "one" / file, place)  # written again: what it holds counts, not when
    result = converted(tmp_path / "one", tmp_path / "two", {"pp": 3})
    assert result.bytes_kept > 0
    differ = {name for name, data in contents(tmp_path / "two").items() if contents(tmp_path / "direct")[name] != data}
    assert differ == {ROOT}


def test_a_truncated_shard_file_is_named(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    converted(tiny("llama"), tmp_path / "one", {"tp": 2})
    tamper.truncate(tmp_path / "one" / "stage-0-tp-1.safetensors", 100)
    with pytest.raises(ManifestError, match=r"stage-0-tp-1.safetensors has \d+ bytes, not the \d+"):
        converted(tmp_path / "one", tmp_path / "two")
    (tmp_path / "one" / "stage-0-tp-1.safetensors").unlink()
    with pytest.raises(ManifestError, match=r"stage-0-tp-1.safetensors can't be read: No such file"):
        converted(tmp_path / "one", tmp_path / "two")


@pytest.mark.parametrize("name", ["family.yaml", "source/config.json", "source/headers/model.safetensors.json"])
def test_documents_that_are_damaged_are_named(tiny: MakeCheckpoint, tmp_path: Path, run_cli: RunCli, name: str) -> None:
    converted(tiny("llama_single"), tmp_path / "one", {"tp": 2})
    tamper.flip(tmp_path / "one" / name, 20)
    said = run_cli("convert", tmp_path / "one", tmp_path / "two", "--tp", 4, code=1).stderr
    assert f"{tmp_path / 'one' / name} has the digest" in said
    assert not (tmp_path / "two").exists()


def test_a_source_that_changes_meanwhile_is_refused(
    tiny: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted(tiny("llama"), tmp_path / "one", {"tp": 2})
    path = tmp_path / "one" / "stage-0-tp-0.safetensors"
    monkeypatch.setattr("converter.forward.move.Move.finish", lambda *_, **__: path.touch())
    with pytest.raises(CheckpointError, match=r"stage-0-tp-0.safetensors was changed while it was read"):
        converted(tmp_path / "one", tmp_path / "two")
    assert not (tmp_path / "two").exists()


def test_an_unfinished_output_is_refused(tiny: MakeCheckpoint, tmp_path: Path, run_cli: RunCli) -> None:
    sizes = ("--tp", 2, "--part", "1/2")
    run_cli("convert", tiny("llama"), tmp_path / "one", *sizes)
    for words in (
        ("convert", tmp_path / "one", tmp_path / "two"),
        ("plan-memory", tmp_path / "one", "--cluster", "1x1:1GB"),
    ):
        said = run_cli(*words, code=2).stderr
        assert "holds a conversion that isn't finished" in said


def test_some_ranks_hold_what_they_hold(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    source = tiny("deepseek_v3")
    converted(source, tmp_path / "one", {"pp": 3}, ranks=(1,))
    with pytest.raises(ManifestError, match=r"made for ranks 1 alone; ask for ranks that need no more"):
        converted(tmp_path / "one", tmp_path / "two", {"pp": 3, "tp": 2})
    assert not (tmp_path / "two").exists()
    converted(source, tmp_path / "direct", {"pp": 3, "tp": 2}, ranks=(2, 3))
    converted(tmp_path / "one", tmp_path / "two", {"pp": 3, "tp": 2}, ranks=(2, 3))
    one, two = contents(tmp_path / "direct"), contents(tmp_path / "two")
    assert {name for name in one if one[name] != two[name]} == {ROOT}
    assert check(tmp_path / "two", deep=tmp_path / "one").passed


def test_a_part_of_a_tensor_is_not_the_tensor(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    converted(tiny("llama"), tmp_path / "one", {"tp": 2}, ranks=(0,))
    with pytest.raises(ManifestError, match=r"holds only a part of model\.\S+: element \[\d+(, \d+)*\] is in no shard"):
        converted(tmp_path / "one", tmp_path / "two")
    converted(tiny("llama"), tmp_path / "direct", {"tp": 4}, ranks=(0, 1))
    converted(tmp_path / "one", tmp_path / "two", {"tp": 4}, ranks=(0, 1))  # cut finer: the same half
    one, two = contents(tmp_path / "direct"), contents(tmp_path / "two")
    assert {name for name in one if one[name] != two[name]} == {ROOT}


def test_layers_that_were_left_out_are_missed_early(tiny: MakeCheckpoint, tmp_path: Path, run_cli: RunCli) -> None:
    converted(tiny(NAME), tmp_path / "one", mtp="drop")
    plan = tmp_path / "plan.yaml"
    write_plan(make_plan(bound(tiny(NAME)), {"tp": 2}), plan)
    for words in (
        ("convert", tmp_path / "one", tmp_path / "two", "--plan", plan),
        ("convert", tmp_path / "one", tmp_path / "two", "--tp", 2),
        ("plan-memory", tmp_path / "one", "--cluster", "1x2:1GB"),
        ("plan-memory", tmp_path / "one", "--plan", plan, "--cluster", "1x2:1GB"),
    ):
        assert "lacks the multi-token-prediction layers" in run_cli(*words, code=2).stderr
    assert not (tmp_path / "two").exists()
    run_cli("convert", tmp_path / "one", tmp_path / "two", "--tp", 2, "--mtp", "drop")
    converted(tiny(NAME), tmp_path / "kept")
    with pytest.raises(ManifestError, match=r"one doesn't hold model.layers.3"):
        check(tmp_path / "kept", deep=tmp_path / "one")


def test_a_plan_for_another_checkpoint_is_refused(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    converted(tiny("llama"), tmp_path / "one")
    with pytest.raises(PlanError, match="the plan is for another checkpoint"):
        convert(tmp_path / "one", tmp_path / "two", make_plan(bound(tiny("llama_bias"))))
    with pytest.raises(CheckpointError, match="compare with the one it was made from"):
        check(tmp_path / "one", deep=tiny("llama_bias"))


def test_what_was_begun_from_the_checkpoint_is_not_gone_on_with(
    tiny: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crash.many_units(monkeypatch)
    source, whole = tiny("llama"), sum(path.stat().st_size for path in tiny("llama").glob("*.safetensors"))
    converted(source, tmp_path / "one", {"tp": 2})
    assert crash.killed_halfway(source, tmp_path / "two", {"tp": 4}, whole)
    with pytest.raises(
        OutputError, match=r"holds an unfinished conversion by .*, not by .*, by the output [0-9a-f]{32}"
    ):
        converted(tmp_path / "one", tmp_path / "two", {"tp": 4})
    converted(source, tmp_path / "two", {"tp": 4})


def test_the_same_output_is_found_whole(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    converted(tiny("llama"), tmp_path / "one", {"tp": 2})
    converted(tiny("llama"), tmp_path / "two", {"pp": 3})
    before = contents(tmp_path / "two")
    assert converted(tmp_path / "one", tmp_path / "two", {"pp": 3}).bytes_written == 0
    assert contents(tmp_path / "two") == before
    with pytest.raises(OutputError, match="choose another folder"):
        converted(tmp_path / "one", tmp_path / "one", {"pp": 3})


def test_an_output_inside_its_source_is_refused(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    converted(tiny("llama"), tmp_path / "one", {"tp": 2})
    for out in (tmp_path / "one" / "two", tmp_path / "one" / "source" / "two"):
        with pytest.raises(OutputError, match="lie in one another"):
            converted(tmp_path / "one", out, {"pp": 3})
    assert check(tmp_path / "one").passed


NONSENSE: list[tuple[str, dict[str, object]]] = [
    ("layers.0.mlp.down", {"tensor": "model.layers.9.mlp.down_proj.weight"}),
    ("layers.0.mlp.down", {"cuts": [{"runs": [[0, 64]], "repeat": 1}, {"runs": [[90, 138]], "repeat": 1}]}),
    ("layers.0.mlp.down", {"tensor": "model.norm.weight"}),
    ("layers.0.attn.norm", {"experts": "0", "tensor": "model.norm.{expert}"}),
]


@pytest.mark.parametrize(("tensor", "change"), NONSENSE)
def test_manifests_that_tell_nonsense_are_refused(
    tiny: MakeCheckpoint, tmp_path: Path, tensor: str, change: dict[str, object]
) -> None:
    """All digests are right, so that only what is told is wrong."""
    converted(tiny("llama"), tmp_path / "one", {"tp": 2})
    with tamper.opened(tmp_path / "one", "stage-0-tp-0.safetensors") as shard:
        shard.entry(tensor)["sources"][0].update(change)
    with pytest.raises(ReshardError):
        converted(tmp_path / "one", tmp_path / "two", {"pp": 3})
    assert not (tmp_path / "two").exists()


def test_another_precision_is_refused(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    convert(tiny("llama"), tmp_path / "one", tp=2, weights="attention=fp32")
    with pytest.raises(
        ManifestError, match=r"holds layers.0.attn.qkv in another precision than its checkpoint \(--weights\)"
    ):
        converted(tmp_path / "one", tmp_path / "two")


def test_a_converted_checkpoint_is_the_way_from_one_to_another(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    convert(tiny("llama"), tmp_path / "one", tp=2, weights="attention=fp32")
    restore(tmp_path / "one", tmp_path / "between", converted=True)
    convert(tmp_path / "between", tmp_path / "two", tp=4)
    convert(tiny("llama"), tmp_path / "direct", tp=4, weights="attention=fp32")
    for path in (tmp_path / "direct").glob("*.safetensors"):
        there, here = load_file(path), load_file(tmp_path / "two" / path.name)
        assert all(torch.equal(there[name], here[name]) for name in there) and there.keys() == here.keys()


def test_precision_changes_on_the_way_as_from_the_checkpoint(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    converted(tiny("llama"), tmp_path / "one", {"tp": 2})
    for source, out in ((tiny("llama"), "direct"), (tmp_path / "one", "two")):
        convert(source, tmp_path / out, tp=4, weights="attention=fp32")
    direct, two = contents(tmp_path / "direct"), contents(tmp_path / "two")
    assert {name for name in direct if direct[name] != two[name]} == {ROOT}
    assert check(tmp_path / "two", deep=tmp_path / "one").passed
