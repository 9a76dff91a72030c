"""docs/format.md: the reader that it prints reads what convert writes, and its rules are the ones that are followed."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from shard_plans.documents.plan import plan_digest
from tests.conftest import MakeCheckpoint
from tests.tools import refusals, tamper
from tests.tools.converted import bound, converted
from tests.tools.little import write_little
from tests.tools.little_configs import CONFIGS, little
from tests.tools.plans import make_plan

PAGE = Path(__file__).parents[2] / "docs" / "format.md"


def reader() -> str:
    return str(re.findall(r"```python\n(import.*?)```", PAGE.read_text(), re.DOTALL)[-1])


def run_reader(folder: Path, out: Path, rank: int) -> subprocess.CompletedProcess[str]:
    code = reader()
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


def test_the_reader_is_short_and_needs_little() -> None:
    tree = ast.parse(reader())
    found = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    found |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert found == {"json", "numpy", "xxhash", "sys", "pathlib"}
    assert len(reader().splitlines()) <= 60


def another_plan(out: Path) -> None:
    path = out / "stage-0-tp-0.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"plan": "0" * 32}))
    tamper.seal(out)


SPOILS: dict[str, tuple[Callable[[Path], object], str]] = {
    "root": (
        lambda out: refusals.edit(out / "manifest.json", lambda root: root.update(family="x")),
        "manifest.json has",
    ),
    "manifest": (lambda out: tamper.flip(out / "stage-0-tp-0.json", -2), "stage-0-tp-0.json has"),
    "header": (
        lambda out: tamper.flip(out / "stage-0-tp-0.safetensors", 4000),
        "header of stage-0-tp-0.safetensors has",
    ),
    "short": (lambda out: tamper.truncate(out / "stage-0-tp-0.safetensors"), "in stage-0-tp-0.safetensors has"),
    "plan": (another_plan, "plan of stage-0-tp-0.safetensors has"),
}


@pytest.mark.parametrize("what", SPOILS)
def test_the_reader_notices_whatever_is_wrong(tmp_path: Path, what: str) -> None:
    source = write_little(tmp_path / "source", CONFIGS["llama"], little("llama"))
    converted(source, tmp_path / "out")
    spoil, words = SPOILS[what]
    spoil(tmp_path / "out")
    ran = run_reader(tmp_path, tmp_path / "out", 0)
    assert ran.returncode == 1
    assert words in ran.stderr


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
