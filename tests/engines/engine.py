"""Ranks of vLLM on this CPU: a process each, forked from one whose interpreter has the engine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

PYTHON = Path(os.environ.get("RESHARD_VLLM_PYTHON", ".venv-engines/bin/python"))
"""An interpreter that has vLLM 0.33, and reshard."""
NEEDED = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="no environment with vLLM: make test-engines"),
]
"""Marks of tests that run it."""


def compared(
    folders: Sequence[tuple[Path, Path]], load_format: str, sizes: dict[str, int], **more: Any
) -> list[list[dict[str, Any]]]:
    """What each rank of the engine, started with these sizes, says of each pair of folders (vllm_compare.py)."""
    tp, pp, dp = (sizes.get(axis, 1) for axis in ("tp", "pp", "dp"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pairs = [list(map(str, pair)) for pair in folders]
    job = {"folders": pairs, "load_format": load_format, "port": port, "tp": tp, "pp": pp, "dp": dp}
    job |= {"ep": sizes.get("ep", 1) > 1} | more
    engine = _start()
    assert engine.stdin and engine.stdout
    print(json.dumps([job | {"rank": rank} for rank in range(tp * pp * dp)]), file=engine.stdin, flush=True)
    answer = json.loads(engine.stdout.readline() or '{"failed": "the engine\'s process has ended"}')
    assert "failed" not in answer, answer["failed"]
    ranks: list[list[dict[str, Any]]] = answer["ranks"]
    return ranks


@cache
def _start() -> subprocess.Popen[str]:
    """The process that has imported the engine, which takes long, once for all tests; it ends with ours."""
    script = Path(__file__).with_name("vllm_compare.py")
    return subprocess.Popen([PYTHON, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
