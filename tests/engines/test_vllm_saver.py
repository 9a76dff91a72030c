"""vLLM itself, on a CPU: what its own saver writes is adopted, compared with the checkpoint and made into it again.

Optional: `make test-engines` makes an environment with the engine; without one these tests are skipped.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from converter.check import check
from converter.restore import restore
from converter.verbs import adopt, convert
from tests.conftest import MakeCheckpoint
from tests.converter.test_adopt import equal
from tests.engines.checkpoints import as_published
from tests.engines.engine import NEEDED, compared

pytestmark = NEEDED


@pytest.mark.parametrize(
    ("name", "sizes"), [("qwen3_moe", {"tp": 2, "ep": 2}), ("llama", {"tp": 2, "pp": 2}), ("deepseek_v3", {})], ids=str
)
def test_what_the_engine_saves_is_read_back(
    name: str, sizes: dict[str, int], own_tiny: MakeCheckpoint, tmp_path: Path
) -> None:
    source, folder = as_published(own_tiny(name)), tmp_path / "saved"
    folder.mkdir()
    compared([(source, folder)], "save", sizes)
    shutil.copy(source / "config.json", folder)
    assert len(list(folder.glob("*-part-1.safetensors"))) == sizes.get("tp", 1) * sizes.get("pp", 1)
    by_config = shutil.copytree(folder, tmp_path / "by_config")
    found = adopt(folder, source)
    assert (found.tp, found.pp, found.ep) == (sizes.get("tp", 1), sizes.get("pp", 1), sizes.get("ep", 1))
    result = check(folder, source)
    assert result.passed, result.failures
    convert(folder, tmp_path / "out", tp=2)
    assert check(tmp_path / "out", source).passed
    adopt(by_config)
    restore(by_config, tmp_path / "back")
    assert equal(tmp_path / "back", source)
