"""restore --converted: a checkpoint of the converted weights, from which the same shards come again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from converter.check import check
from converter.restore import restore
from shard_plans.errors import ManifestError
from tests.conftest import MakeCheckpoint
from tests.tools import reweighed
from tests.tools.converted import converted

MATRICES = ("attention", "experts", "shared", "mlp")
CASES = [
    ("deepseek_v3_fp8", "bf16", {"tp": 2, "ep": 2}), ("deepseek_v3", "fp8_block", {"tp": 4, "ep": 2, "etp": 2}),
    ("llama", "int4_group", {"tp": 2}), ("qwen3_moe", "nvfp4", {"tp": 2, "ep": 2}),
    ("qwen3_moe", "fp8_channel", {"tp": 2}), ("gpt_oss_mxfp4", "bf16", {"tp": 2, "ep": 2}),
    ("deepseek_v3_mtp", "mxfp4_group", {"pp": 2, "tp": 2}), ("llama", "int8_channel", {"pp": 3}),
]  # fmt: skip


@pytest.mark.parametrize(("source", "name", "sizes"), CASES)
def test_the_converted_checkpoint_makes_the_same_shards(
    tiny: MakeCheckpoint, tmp_path: Path, source: str, name: str, sizes: dict[str, int]
) -> None:
    folder, out, again = tiny(source), tmp_path / "out", tmp_path / "again"
    converted(folder, out, sizes, weights=dict.fromkeys(MATRICES, name))
    result = restore(out, tmp_path / "restored", converted=True)
    assert result.dropped == 0
    converted(tmp_path / "restored", again, sizes)
    assert check(again, tmp_path / "restored").passed
    files = sorted(path.name for path in out.glob("*.safetensors"))
    for file in files:
        ours, theirs = (reweighed.read_file(path / file) for path in (out, again))
        assert ours.keys() == theirs.keys()
        for tensor, (dtype, shape, data) in ours.items():
            assert (dtype, shape) == theirs[tensor][:2] and data.tobytes() == theirs[tensor][2].tobytes(), tensor
    index = tmp_path / "restored" / "model.safetensors.index.json"
    if index.exists():
        names = {n for path in (tmp_path / "restored").glob("*.safetensors") for n in reweighed.read_file(path)}
        assert json.loads(index.read_bytes())["weight_map"].keys() == names
    config = json.loads((tmp_path / "restored" / "config.json").read_bytes())
    assert ("quantization_config" in config) == (name != "bf16")


def test_without_the_option_it_is_refused(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    converted(tiny("llama"), tmp_path / "out", weights={"mlp": "fp8_block"})
    with pytest.raises(ManifestError, match=r"another precision than its checkpoint .* --converted writes"):
        restore(tmp_path / "out", tmp_path / "restored")
    assert not (tmp_path / "restored").exists()


def test_two_formats_have_no_config(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    converted(tiny("llama"), tmp_path / "out", weights={"mlp": "fp8_block", "attention": "nvfp4"})
    with pytest.raises(ManifestError, match=r"weights in fp8_block and nvfp4, and a config.json describes one"):
        restore(tmp_path / "out", tmp_path / "restored", converted=True)
    assert not (tmp_path / "restored").exists()


def test_an_output_as_stored_is_restored_the_same_with_the_option(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    converted(tiny("llama"), tmp_path / "out", {"tp": 2})
    restore(tmp_path / "out", tmp_path / "restored", converted=True)
    for path in tiny("llama").glob("model*.safetensors"):
        assert (tmp_path / "restored" / path.name).read_bytes() == path.read_bytes()
