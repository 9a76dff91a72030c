"""What options name to be written, apart from one another and from what is read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from shard_plans.documents.manifest_records import ROOT
from shard_plans.errors import OutputError

REPORTS = (".yaml", ".yml", ".html", ".htm", ".xml")
"""How the names of files end that reshard may have put beside a checkpoint's."""


def check_apart(written: Mapping[str, Path | None], read: Mapping[str, Path | None]) -> None:
    """Raise OutputError where two options name one file to write, or one names what is read.

    `written` and `read`: option -> its path. Nothing is written into an output; of another folder that is read no file
    is replaced but reports and plans.
    """
    seen: dict[str, str] = {}
    for option, path in written.items():
        if path is None:
            continue
        real = Path(os.path.realpath(path))
        if str(real) in seen:
            raise OutputError(f"{seen[str(real)]} and {option} both name {path}; give each a file of its own")
        seen[str(real)] = option
        for source, given in read.items():
            if given is None:
                continue
            place = Path(os.path.realpath(given))
            if real.is_relative_to(place) and os.path.lexists(place / ROOT):
                raise OutputError(f"{option} {path} lies in the output {given}, which is only read")
            kept = real.parent == place and os.path.lexists(real) and not real.name.endswith(REPORTS)
            if kept or real == place:
                raise OutputError(f"{option} {path} would replace what is read ({source}); give another name")


def output_of(plan: Path | None) -> Path | None:
    """The output that a plan lies in; None for a plan of its own, which may be replaced."""
    return plan.parent if plan is not None and os.path.lexists(plan.parent / ROOT) else None
