"""What lies in an output folder: nothing, the same conversion finished or unfinished, or something else."""

from __future__ import annotations

import os
from collections.abc import Set
from pathlib import Path

from converter.output.identity import Identity, parse_marker
from converter.output.partial import PARTIAL
from converter.output.parts import MARKER_LIMIT, is_leftover
from shard_plans.checkpoints.headers import brief
from shard_plans.checkpoints.regular import read_regular
from shard_plans.documents.manifest import MARKER, ROOT, Manifest, read_manifest
from shard_plans.errors import ManifestError, OutputError, using


def finished(path: Path, identity: Identity, names: Set[str]) -> Manifest | None:
    """The manifest of the same conversion, if it lies here whole; None where there is work to do.

    Raises OutputError where the folder holds anything else, or can't be read.
    """
    with using(path, OutputError):
        present = _present(path)
        if ROOT in present:
            return _whole(path, identity)
    whose = marked(path)
    allowed = {*names, *(name + PARTIAL for name in names)}
    present = {name for name in present if not is_leftover(name)}
    foreign = sorted(present - allowed)
    if whose is not None and whose != identity:
        raise OutputError(
            f"{path} holds an unfinished conversion by {whose}, not by {identity}; "
            f"choose another folder, or remove this one"
        )
    if whose is None:
        foreign = sorted(present)
    if foreign:
        raise OutputError(
            f"{path} holds {len(foreign)} files that aren't this conversion's, the first {brief(foreign[0])}; "
            f"choose an empty folder"
        )
    return None


def _present(path: Path) -> set[str]:
    if not path.is_dir():
        if os.path.lexists(path):
            raise OutputError(f"{path} isn't a folder; choose another output")
        return set()
    return {
        os.path.relpath(os.path.join(base, name), path)
        for base, folders, files in os.walk(path, onerror=_raise)
        for name in files + [f for f in folders if os.path.islink(os.path.join(base, f))]
    }


def _whole(path: Path, identity: Identity) -> Manifest:
    try:
        manifest = read_manifest(path)
    except ManifestError as error:
        raise OutputError(f"{path} holds a damaged output ({error}); remove it to convert again") from error
    found = Identity(manifest.plan, manifest.source.fingerprint, manifest.partial)
    if found != identity.result:
        raise OutputError(
            f"{path} holds the output of {found}, not of {identity}; choose another folder, or remove this one"
        )
    for file in manifest.files:
        shard = path / file.name
        size = shard.stat().st_size if shard.is_file() else None
        if size != file.size:
            what = "lacks the file" if size is None else f"holds {size} of {file.size} bytes of"
            raise OutputError(f"{path} {what} {file.name}; run reshard check, or remove it to convert again")
    return manifest


def marked(path: Path) -> Identity | None:
    """Whose unfinished conversion the marker says that it is; None where there is none, or it can't be read."""
    try:
        return parse_marker(read_regular(path / MARKER, MARKER_LIMIT))
    except (OSError, ValueError):
        return None  # a crash while it was written; then nothing else lies here


def _raise(error: OSError) -> None:
    raise error
