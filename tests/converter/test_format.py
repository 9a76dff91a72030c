"""docs/format.md: the reader that it prints reads what convert writes, and its rules are the ones that are followed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import xxhash

from shard_plans.documents.plan import plan_digest
from tests.conftest import MakeCheckpoint
from tests.tools import tamper
from tests.tools.converted import bound, converted
from tests.tools.plans import make_plan

PAGE = Path(__file__).parents[2] / "docs" / "format.md"


def run_reader(folder: Path, out: Path, rank: int) -> subprocess.CompletedProcess[str]:
    code = re.findall(r"```python\n(import.*?)```", PAGE.read_text(), re.DOTALL)[-1]
    (folder / "reader.py").write_text(code)
    command = [sys.executable, "-I", str(folder / "reader.py"), str(out), str(rank)]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_reader_reads_a_rank(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    converted(tiny("deepseek_v3_fp8"), tmp_path / "out", {"tp": 2, "ep": 2})
    ran = run_reader(tmp_path, tmp_path / "out", 1)
    assert ran.returncode == 0, ran.stderr
    lines = dict(line.split(" ", 1) for line in ran.stdout.splitlines())
    assert lines["norm"] == "BF16 [64] 128"
    assert lines["layers.2.experts.gate_up"] == "F8_E4M3 [8, 64, 64] 32768"
    names = {name for file in ("tp-1", "ep-1-etp-0") for name in shard_names(tmp_path / "out" / f"stage-0-{file}.json")}
    assert set(lines) == names


def shard_names(path: Path) -> set[str]:
    return {entry["name"] for entry in json.loads(path.read_text())["tensors"]}


def test_the_reader_notices_a_flip(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    converted(tiny("llama"), tmp_path / "out")
    tamper.flip(tmp_path / "out" / "stage-0-tp-0.safetensors", -1)
    ran = run_reader(tmp_path, tmp_path / "out", 0)
    assert ran.returncode == 1
    assert "in stage-0-tp-0.safetensors has" in ran.stderr


def canonical(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return str(xxhash.xxh3_128_hexdigest(text.encode()))


def test_the_plans_digest_is_as_written(tiny: MakeCheckpoint) -> None:
    binding = bound(tiny("deepseek_v3_mtp"))
    plan = make_plan(binding, {"pp": 2, "dp": 2, "tp": 2, "ep": 4})
    stated = {
        "version": 1, "checkpoint": ["deepseek_v3", binding.checkpoint.fingerprint], "parallel": [2, 2, 2, 4, 1],
        "stages": [[0, 2], [2, 4]], "experts": [["0-3", "4-7", "8-11", "12-15"], {}], "mtp": "keep",
        "strict_blocks": False,
    }  # fmt: skip
    assert plan_digest(plan) == canonical(stated)


def test_the_fingerprint_is_as_written(tiny: MakeCheckpoint) -> None:
    checkpoint = bound(tiny("llama")).checkpoint
    config = xxhash.xxh3_128_hexdigest((checkpoint.folder / "config.json").read_bytes())
    lines = sorted(zip(checkpoint.names, checkpoint.dtypes, checkpoint.shapes, strict=True))
    text = config + "".join(f"\n{name}\t{dtype}\t{','.join(map(str, shape))}" for name, dtype, shape in lines)
    assert checkpoint.fingerprint == xxhash.xxh3_128_hexdigest(text.encode())
