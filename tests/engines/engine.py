"""Ranks of vLLM on this CPU: a process each, run with an interpreter that has the engine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Sequence
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
    script = Path(__file__).with_name("vllm_compare.py")
    ranks = [
        subprocess.Popen(
            [PYTHON, script, json.dumps(job | {"rank": rank})],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(tp * pp * dp)
    ]  # fmt: skip
    answers = [process.communicate(timeout=900) for process in ranks]
    for process, (_, errors) in zip(ranks, answers, strict=True):
        assert process.returncode == 0, errors[-2000:]
    return [json.loads(printed.splitlines()[-1]) for printed, _ in answers]
