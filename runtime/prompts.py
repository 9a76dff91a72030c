"""A file of prompts, one a line, and the few that come with reshard."""

from __future__ import annotations

import json
from pathlib import Path

from shard_plans.errors import RuntimeFault

LARGEST = 1 << 24
"""Bytes of a file."""


BUNDLED = "bundled"
"""Stands for the prompts that come with reshard: code, mathematics, a longer text, Chinese."""
_FILE = Path(__file__).parent / "prompts.txt"


def read_prompts(path: Path) -> list[str]:
    """The lines of a UTF-8 file that aren't blank; RuntimeFault where it can't be read or holds none.

    A line that is a JSON string is that string, which may hold line ends. The path `bundled` stands for reshard's own.
    """
    if str(path) == BUNDLED:
        path = _FILE
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST + 1)
        text = raw.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RuntimeFault(f"the prompts {path} can't be read: {error}") from error
    if len(raw) > LARGEST:
        raise RuntimeFault(f"the prompts {path} are more than {LARGEST} bytes; give fewer")
    lines = [line for line in text.split("\n") if line.strip()]
    if not lines:
        raise RuntimeFault(f"the prompts {path} hold no line of text; write one prompt a line")
    return [_text(line.removesuffix("\r")) for line in lines]


def _text(line: str) -> str:
    """The line, or the string that it is in JSON."""
    try:
        found = json.loads(line) if line.startswith('"') else None
    except (ValueError, RecursionError):
        return line
    return found if isinstance(found, str) and found.strip() else line
