"""The words of family tables: which forward blocks exist, which roles each reads, what other words may be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from shard_plans.documents.yaml_text import load_yaml
from shard_plans.errors import FamilyError

COMPUTED = frozenset({"attn.rope_freq"})
"""Roles of buffers that some checkpoints store and everyone computes: no block reads them."""
_FILE = Path(__file__).parent / "tables" / "_blocks.yaml"


@cache
def _vocabulary() -> dict[str, Any]:
    data, _ = load_yaml(_FILE, "block vocabulary")
    return dict(data)


def check_words(words: Mapping[str, Any], family: str, where: str) -> None:
    """Raise FamilyError for a word that the vocabulary lacks or a value that it doesn't allow."""
    vocabulary = _vocabulary()
    for word, value in words.items():
        allowed = vocabulary["slots"].get(word, vocabulary["words"].get(word))
        if allowed is None:
            known = ", ".join(sorted([*vocabulary["slots"], *vocabulary["words"]]))
            raise FamilyError(f"family {family}, {where}: unknown word {word!r}; known: {known}")
        if allowed == "number":
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise FamilyError(f"family {family}, {where}: {word} is {value!r}, a number is wanted")
        elif value not in allowed:
            raise FamilyError(f"family {family}, {where}: {word} is {value!r}, known: {', '.join(map(str, allowed))}")


def check_roles(words: Mapping[str, Any], roles: Iterable[str], family: str, where: str) -> None:
    """Raise FamilyError where a block lacks a role that it reads, or no block reads a role that is there."""
    slots = _vocabulary()["slots"]
    present, read = set(roles), set()
    for slot, blocks in slots.items():
        for role in blocks[words[slot]].split() if slot in words else ():
            choices = role.rstrip("?").split("|")
            read.update(choices)
            if not role.endswith("?") and not present.intersection(choices):
                raise FamilyError(
                    f"family {family}, {where}: the {slot} block {words[slot]} reads {' or '.join(choices)}, "
                    f"which no row gives"
                )
    unread = present - read - COMPUTED - {role.rstrip("?") for role in _vocabulary()["always"].split()}
    if unread:
        raise FamilyError(
            f"family {family}, {where}: no block reads {', '.join(sorted(unread))}; "
            f"the blocks are: {', '.join(f'{slot} {words[slot]}' for slot in slots if slot in words)}"
        )
