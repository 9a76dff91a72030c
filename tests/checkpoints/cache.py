"""Checkpoints that tests share, made once and kept until a maker or a version changes."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

VERSIONS = ("torch", "transformers", "safetensors")


def key() -> str:
    """A digest of the makers' sources and of the versions that decide what they write."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    for package in VERSIONS:
        digest.update(f"{package} {version(package)}".encode())
    return digest.hexdigest()[:16]


def made(root: Path, name: str, make: Callable[[Path], None]) -> Path:
    """The folder `name` of this key below `root`; `make` fills it where it isn't there yet. Older keys are removed."""
    current = root / key()
    folder = current / name
    if folder.exists():
        return folder
    current.mkdir(parents=True, exist_ok=True)
    for old in root.iterdir():
        if old != current:
            shutil.rmtree(old, ignore_errors=True)
    # Under another name until it is whole: an interrupted run leaves nothing that looks like a checkpoint.
    unfinished = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=current))
    try:
        make(unfinished)
        try:
            os.replace(unfinished, folder)
        except OSError:
            if not folder.exists():  # else another run was faster, and made the same
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder
