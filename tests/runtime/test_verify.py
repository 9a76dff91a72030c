"""The ladder passes what is right, and each negative control is caught by the check that is named for it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from converter.verbs import convert
from runtime.checking.checks import AIM
from runtime.checking.probes import Compared
from runtime.request import RunOptions
from runtime.run import verify_and_run
from shard_plans.errors import CheckpointError
from shard_plans.placement.experts import ExpertPlacement, contiguous
from shard_plans.placement.grid import make_grid
from shard_plans.search.search import make_plan
from shard_plans.verbs import open_binding
from tests.conftest import MakeCheckpoint
from tests.tools import tamper
from tests.tools.cli import RunCli
from tests.tools.sharded import checks, convert_tiny, expected, failed, relative

SIZES = {"tp": 2, "pp": 2, "ep": 2}
NAME = "deepseek_v3_fp8"
DOWN = "layers.1.experts.down"
DENSE_FILE, EXPERT_FILE = "stage-0-tp-1.safetensors", "stage-0-ep-1-etp-0.safetensors"


@pytest.fixture(scope="module")
def whole(tiny: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output to be copied."""
    out = tmp_path_factory.mktemp("whole") / "out"
    convert_tiny(tiny(NAME), out, SIZES)
    return out


@pytest.fixture
def output(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "out"))


def test_a_right_output_passes_every_check(output: Path, tiny: MakeCheckpoint, tmp_path: Path) -> None:
    wanted = expected(tiny(NAME))
    logits = tmp_path / "logits.safetensors"
    ids = str(tiny(NAME) / "reference.safetensors")
    result = verify_and_run(RunOptions(output, tiny(NAME), input_ids=ids, logits_out=logits))
    assert result.passed
    assert list(checks(result)) == ["hashes", "bytes", "layers", "operators", "routing", "decode", "hidden", "logits"]
    for name in ("layers", "hidden", "logits"):
        worst = checks(result)[name].worst
        assert worst is not None
        assert 0 < worst < AIM
    assert "layer" in checks(result)["layers"].where
    written = load_file(logits)["logits"]
    assert written.dtype == torch.float32
    assert written.shape == (24, 256)
    assert relative(written, wanted["logits"][0]) < AIM
    assert any("fools both" in sentence for sentence in result.not_checked)


def test_float64_is_measured_in_float64(output: Path, tiny: MakeCheckpoint) -> None:
    result = verify_and_run(RunOptions(output, tiny(NAME), compute="float64"))
    assert result.passed
    for name in ("layers", "hidden", "logits"):
        assert (checks(result)[name].worst or 1) < 1e-12


def test_low_precision_is_a_smoke_test_and_says_so(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    source, out = tiny("qwen3_moe"), tmp_path / "out"
    convert_tiny(source, out, SIZES)
    result = verify_and_run(RunOptions(out, source, compute="bfloat16"))
    assert result.passed
    assert {"layers", "routing", "hidden", "logits", "likelihood"} <= set(checks(result))
    assert all("smoke" in check.note for check in result.checks if check.name not in ("hashes", "bytes"))
    assert any("smoke" in sentence for sentence in result.not_checked)
    tamper.swap_halves(out, EXPERT_FILE, "layers.1.experts.gate_up")
    assert failed(verify_and_run(RunOptions(out, source, compute="bfloat16"))) == {
        "bytes",
        "operators",
    }  # smoke of layers lets it through
    assert {"layers", "hidden", "logits"} <= failed(verify_and_run(RunOptions(out, source)))
    tamper.change(out, DENSE_FILE, "layers.1.attn.o", zero)
    assert {"layers", "logits"} <= failed(verify_and_run(RunOptions(out, source, compute="bfloat16")))


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_an_operator_that_does_not_run_is_wrong(
    compute: str, output: Path, tiny: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    saw = Compared.saw

    def look(self: Compared, operator: str, x: torch.Tensor) -> None:
        if operator != "ffn.norm":
            saw(self, operator, x)

    monkeypatch.setattr(Compared, "saw", look)
    result = verify_and_run(RunOptions(output, tiny(NAME), compute=compute))
    assert not checks(result)["operators"].passed and "ffn.norm" in checks(result)["operators"].where


def test_without_a_reference_only_hashes_are_checked_and_it_says_so(output: Path) -> None:
    result = verify_and_run(RunOptions(output))
    assert result.passed
    assert list(checks(result)) == ["hashes"]
    assert any("No reference" in sentence for sentence in result.not_checked)


def zero(array: np.ndarray) -> np.ndarray:
    return np.zeros_like(array)


def foreign_rows(out: Path) -> None:
    """One tensor of rank 1's file holds what is rank 0's."""
    name = "layers.0.attn.o"
    with tamper.opened(out, DENSE_FILE.replace("tp-1", "tp-0")) as shard:
        data = shard.data[name]
    with tamper.opened(out, DENSE_FILE) as shard:
        shard.data[name] = data


REHASHED: dict[str, tuple[Callable[[Path], None], str, str, str]] = {
    # what is done, and where `bytes` and `layers` must see it
    "experts swapped": (
        lambda out: tamper.swap_experts(out, EXPERT_FILE, "layers.1.experts.gate_up"),
        EXPERT_FILE, r"layers\.1\.experts\.gate_up", "layer 1",
    ),
    "gate and up swapped": (
        lambda out: tamper.swap_halves(out, DENSE_FILE, "layers.0.mlp.gate_up"),
        DENSE_FILE, r"layers\.0\.mlp\.gate_up", "layer 0",
    ),
    "scale one block off": (
        lambda out: tamper.shift_rows(out, DENSE_FILE, "layers.0.attn.q_b.scale"),
        DENSE_FILE, r"layers\.0\.attn\.q_b", "layer 0",
    ),
    "an expert's scale one block off": (
        lambda out: tamper.shift_rows(out, EXPERT_FILE, "layers.1.experts.down.scale"),
        EXPERT_FILE, r"layers\.1\.experts\.down", "layer 1",
    ),
    "another rank's columns": (foreign_rows, DENSE_FILE, r"layers\.0\.attn\.o", "layer 0"),
}  # fmt: skip


@pytest.mark.parametrize("control", REHASHED)
def test_wrong_weights_under_right_digests(control: str, output: Path, tiny: MakeCheckpoint) -> None:
    spoil, file, tensor, layer = REHASHED[control]
    spoil(output)
    result = verify_and_run(RunOptions(output, tiny(NAME)))
    assert not result.passed
    assert {"bytes", "layers", "hidden", "logits"} <= failed(result)
    assert checks(result)["hashes"].passed
    match(f"{file}.*{tensor}", checks(result)["bytes"].where)
    match(layer, checks(result)["layers"].where)
    unspoilt = verify_and_run(RunOptions(output))
    assert unspoilt.passed  # digests alone can't see it, hence the ladder
    assert any("not that they are right" in sentence for sentence in unspoilt.not_checked)


def match(pattern: str, text: str) -> None:
    assert re.search(pattern, text), text


def test_a_router_without_its_bias_is_caught_by_routing(output: Path, tiny: MakeCheckpoint) -> None:
    for file, name in tamper.find(output, "moe.router_bias"):
        tamper.change(output, file, name, zero)
    result = verify_and_run(RunOptions(output, tiny(NAME)))
    assert {"bytes", "layers", "routing"} <= failed(result)
    where = checks(result)["routing"].where
    match(r"layer \d, rank \d, token \d+: experts \[.*\], the reference chose \[.*\] by a margin", where)


def test_a_lost_tensor(output: Path, tiny: MakeCheckpoint) -> None:
    tamper.lose(output, DENSE_FILE, "layers.0.attn.o")
    tamper.lose(output, DENSE_FILE, "layers.0.attn.o.scale")
    result = verify_and_run(RunOptions(output, tiny(NAME)))
    assert failed(result) == {"bytes", "layers"}
    match(r"layers\.0\.(attn\.o|self_attn\.o_proj)", checks(result)["bytes"].where)
    match(r"layer 0.*attn\.o is missing", checks(result)["layers"].where)


AT_REST: dict[str, tuple[Callable[[Path], None], str]] = {
    "a flipped bit": (
        lambda out: tamper.flip(out / EXPERT_FILE, tamper.tensor_offset(out, EXPERT_FILE, DOWN)[0], 3),
        rf"{EXPERT_FILE}, tensor layers\.1\.experts\.down: bytes \d+ to",
    ),
    "a truncated file": (lambda out: tamper.truncate(out / EXPERT_FILE), rf"{EXPERT_FILE}.*cuts tensor.*truncated"),
    "another rank's file": (
        lambda out: tamper.swap_files(out, EXPERT_FILE, EXPERT_FILE.replace("ep-1", "ep-0")),
        r"stage-0-ep-0-etp-0.*\"ep\":1.*another rank",
    ),
    "another stage's file": (
        lambda out: tamper.swap_files(out, DENSE_FILE, DENSE_FILE.replace("stage-0", "stage-1")),
        r"stage-\d-tp-1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("control", AT_REST)
@pytest.mark.parametrize("compared", [True, False])
def test_damage_is_caught_by_hashes(control: str, compared: bool, output: Path, tiny: MakeCheckpoint) -> None:
    spoil, where = AT_REST[control]
    spoil(output)
    result = verify_and_run(RunOptions(output, tiny(NAME) if compared else None))
    assert failed(result) == ({"hashes", "bytes"} if compared else {"hashes"})
    match(where, checks(result)["hashes"].where)
    assert result.generated == ()
    assert any("didn't come to its end" in sentence for sentence in result.not_checked)


def test_a_replica_with_other_experts_is_caught_without_a_reference(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    binding = open_binding(tiny("qwen3_moe"))
    plan = make_plan(binding, make_grid(dp=2, ep=1, etp=1))
    ids = contiguous(16, 1)[0]
    plan = replace(plan, experts=ExpertPlacement((ids, ids[::-1])))
    convert(tiny("qwen3_moe"), tmp_path / "out", plan)
    result = verify_and_run(RunOptions(tmp_path / "out"))
    assert result.passed
    assert set(checks(result)) == {"hashes", "replicas"}
    tamper.swap_experts(tmp_path / "out", "stage-0-edp-1-ep-0-etp-0.safetensors", "layers.2.experts.gate_up", 3, 9)
    result = verify_and_run(RunOptions(tmp_path / "out"))
    assert failed(result) == {"replicas"}
    match(r"replica 1 \(rank 1\) against replica 0, token \d+", checks(result)["replicas"].where)


def test_a_damaged_document_is_a_failed_check_not_bad_input(output: Path, run_cli: RunCli) -> None:
    """Whichever rank's manifest it is: the last one's is read before the ranks start."""
    for name in ("stage-0-tp-0.json", sorted(output.glob("stage-*.json"))[-1].name, "source/config.json", "plan.yaml"):
        path = output / name
        kept = path.read_bytes()
        path.write_bytes(kept[:-2] + bytes([kept[-2] ^ 1]) + kept[-1:])
        ran = run_cli("verify-and-run", output, "--json", code=1)
        assert [(check["name"], check["passed"]) for check in ran.json["checks"]] == [("hashes", False)]
        assert Path(name).name in ran.json["checks"][0]["where"]
        path.write_bytes(kept)
    (output / "manifest.json").unlink()
    run_cli("verify-and-run", output, code=2)


def test_logits_are_refused_before_the_run_where_they_can_not_be_written(
    output: Path, tmp_path: Path, run_cli: RunCli
) -> None:
    ran = run_cli("verify-and-run", output, "--logits-out", tmp_path / "none" / "logits.safetensors", code=2)
    assert "isn't there or can't be written" in ran.stderr


def test_another_checkpoint_as_reference_is_refused(output: Path, tiny: MakeCheckpoint) -> None:
    with pytest.raises(CheckpointError, match="converted from"):
        verify_and_run(RunOptions(output, tiny("deepseek_v3")))
