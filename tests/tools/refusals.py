"""What a refusal looks like, and documents spoilt for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.tools.cli import Ran, RunCli


def refused(ran: Ran, *words: str) -> None:
    """One sentence on standard error, with these words in it; no traceback."""
    assert ran.exit_code == 2
    lines = ran.stderr.strip().splitlines()
    assert len(lines) == 1, ran.stderr
    for word in words:
        assert word in lines[0], lines[0]


def nothing_whole(out: Path, run_cli: RunCli) -> None:
    """No output that any verb would take for whole."""
    assert not (out / "manifest.json").exists()
    assert list(out.rglob("*.safetensors")) == []
    refused(run_cli("check", out, code=2), out.name)


def edit(path: Path, change: Callable[[Any], None]) -> None:
    """Change a JSON document in place."""
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
