"""The plans that README.md and docs/kimi-k3.md show are what the commands beside them print today."""

from __future__ import annotations

import re
import shlex
from itertools import takewhile
from pathlib import Path

import pytest

from tests.checkpoints.giant import CONFIGS
from tests.tools.cli import RunCli

ROOT = Path(__file__).parents[2]
MODELS = {"DeepSeek-V3": CONFIGS / "deepseek-v3.json", "K3": CONFIGS / "kimi-k3.json"}
"""Checkpoints of the examples whose config.json is at hand: plans of full-size ones need no weights."""
LEFT_OUT = re.compile(r"(?:^| )\.\.\.(?: |$)")
"""Three dots by themselves."""


def examples() -> list[tuple[str, list[str]]]:
    """Each `$ reshard plan-memory MODEL ...` with the passages shown below it, up to what is left out."""
    found = []
    for page in (ROOT / "README.md", ROOT / "docs" / "kimi-k3.md"):
        for block in page.read_text("utf-8").split("\n    $ ")[1:]:
            command, *lines = block.splitlines()
            shown = list(takewhile(lambda line: line.startswith("    "), lines))
            words = shlex.split(command)
            if words[:2] == ["reshard", "plan-memory"] and words[2] in MODELS:
                found.append((command, passages(shown)))
    return found


def passages(lines: list[str]) -> list[str]:
    """Lines that follow one another, as one line of words; `...` ends a passage."""
    text = " ".join(" ".join(lines).split())
    return [passage.strip() for passage in LEFT_OUT.split(text) if passage.strip()]


@pytest.mark.parametrize(("command", "shown"), examples(), ids=lambda value: value if isinstance(value, str) else "")
def test_plans_are_printed_as_shown(
    command: str, shown: list[str], run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")  # bars are as wide as that
    words = shlex.split(command)[1:]
    words[1] = str(MODELS[words[1]])
    if "-o" in words:
        words[words.index("-o") + 1] = str(tmp_path / "plan.yaml")
    printed = " ".join(run_cli(*words, code=None).stdout.split())
    for passage in shown:
        assert passage in printed
    assert shown[0].replace(" tensors", "0 tensors") not in printed  # another number isn't found


def test_there_are_examples() -> None:
    assert len(examples()) >= 3
