"""A file of prompts, one a line."""

from __future__ import annotations

from pathlib import Path

from shard_plans.errors import RuntimeFault

LARGEST = 1 << 24
"""Bytes of a file."""


def read_prompts(path: Path) -> list[str]:
    """The lines of a UTF-8 file that aren't blank; RuntimeFault where it can't be read or holds none."""
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
    return [line.removesuffix("\r") for line in lines]
