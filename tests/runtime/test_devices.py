"""One module knows vendors, and nothing that torch calls deprecated is used."""

from __future__ import annotations

import ast
import re
import warnings
from pathlib import Path

import pytest

import runtime
from runtime.comm.devices import KINDS
from runtime.request import RunOptions
from runtime.run import verify_and_run
from tests.conftest import MakeCheckpoint
from tests.tools.sharded import convert_tiny

ROOT = Path(runtime.__file__).parents[1]
ALLOWED = ROOT / "runtime" / "comm" / "devices.py"
VENDORS = {name for name in KINDS if name != "cpu"} | {"accelerator"}
BACKENDS = {kind.backend for kind in KINDS.values()} - {"gloo"}


def vendor_words(source: str) -> list[str]:
    """Attributes (`torch.cuda`, `x.cuda()`, `pin_memory`) and strings (`cuda:0`, `nccl`) that fit one vendor alone."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in VENDORS | {"pin_memory"}:
            found.append(f"line {node.lineno}: .{node.attr}")
        if isinstance(node, ast.keyword) and node.arg == "pin_memory":
            found.append(f"line {node.value.lineno}: pin_memory")
        if isinstance(node, ast.Constant) and str(node.value).partition(":")[0] in VENDORS | BACKENDS:
            found.append(f"line {node.lineno}: {node.value!r}")
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            found += [
                f"line {node.lineno}: {name}" for name in names if re.match(r"torch[._](cuda|musa|npu|xpu)", name)
            ]
    return found


def test_no_other_module_knows_a_vendor() -> None:
    sources = [path for folder in ("runtime", "converter", "shard_plans") for path in (ROOT / folder).rglob("*.py")]
    found = {path: words for path in sources if (words := vendor_words(path.read_text()))}
    assert set(found) == {ALLOWED}, {str(path): words for path, words in found.items() if path != ALLOWED}
    assert len(sources) > 100


def test_what_is_looked_for_is_found() -> None:
    code = "import torch.cuda\nx.cuda()\ntorch.device('cuda:1')\nf('nccl')\ntorch.empty(1, pin_memory=True)\n'cpu'\n"
    assert [int(re.findall(r"\d+", words)[0]) for words in sorted(vendor_words(code))] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("name", ["llama", "deepseek_v3_fp8", "qwen3_next"])
def test_no_warning_of_any_kind(name: str, tiny: MakeCheckpoint, tmp_path: Path) -> None:
    """Deprecations above all, with the installed torch; a dense model, a sparse one and one with a recurrence."""
    convert_tiny(tiny(name), tmp_path / "out", {"tp": 2})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert verify_and_run(RunOptions(tmp_path / "out", tiny(name), max_new_tokens=2)).passed
        with pytest.raises(FutureWarning):
            warnings.warn("so it would be seen", FutureWarning, stacklevel=1)
