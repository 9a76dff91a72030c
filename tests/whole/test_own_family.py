"""A family table of one's own: it runs where the blocks cover it, and else the block that is missing is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.conftest import MakeCheckpoint
from tests.tools.cli import RunCli
from tests.tools.sharded import expected, relative

LLAMA = "family: mine\nmatch: [mine]\nextends: llama\n"


@pytest.fixture
def source(own_tiny: MakeCheckpoint) -> Path:
    """A llama under a name that no bundled table knows."""
    folder = own_tiny("llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "mine"}))
    return folder


def test_what_the_blocks_cover_runs(source: Path, tmp_path: Path, run_cli: RunCli) -> None:
    table, out, logits = tmp_path / "mine.yaml", tmp_path / "out", tmp_path / "logits.safetensors"
    table.write_text(LLAMA)
    assert "--family FILE" in run_cli("convert", source, out, "--tp", 2, code=2).stderr
    run_cli("convert", source, out, "--tp", 2, "--family", table)
    ids = source / "reference.safetensors"
    found = run_cli(
        "verify-and-run", out, "--reference", source, "--input-ids", ids, "--logits-out", logits, "--json"
    ).json
    assert found["passed"] and found["family"] == "mine"
    assert relative(load_file(logits)["logits"], expected(source)["logits"][0]) < 1e-5


def test_a_block_that_is_missing_is_named(source: Path, tmp_path: Path, run_cli: RunCli) -> None:
    table, out = tmp_path / "mine.yaml", tmp_path / "out"
    table.write_text(LLAMA + "blocks:\n  model: {norm: layernorm}\n")
    run_cli("convert", source, out, "--tp", 2, "--family", table)
    ran = run_cli("verify-and-run", out, "--json", code=2)
    assert "no block for norm: layernorm; the runtime has rms, rms_zero_centred, rms_cast_last" in ran.stderr
    assert ran.json["error"]["kind"] == "RuntimeFault"
