"""Mutations of bytes, and of YAML text by its lines."""

from __future__ import annotations

import random
from collections.abc import Sequence

BYTES = (b"\0", b"\xff", b"\n", b" ", b'"', b"{", b"}", b"[", b"]", b",", b":", b"-", b"0", b"9", b"\xed\xa0\x80", b"e")
LINES = (
    "a: &a [x, x]", "b: [*a, *a]", "!!python/object/apply:os.system ['true']", "---", "...", "%YAML 1.1", "<<: {a: 1}",
    "? [a]\n: 1", "\tx: 1", "x: |\n  y", "x: >-\n  y", "- 1", "}", "]", "x: 'y", 'x: "\\ud800"', "x: !x y", "# x",
    "1: 1",
    "a: &a1 [lol,lol,lol,lol]\nb: &b1 [*a1,*a1,*a1,*a1]\nc: [*b1,*b1,*b1,*b1]", "x: [1, 2", "x: 2026-01-01", "x: 1_000",
    "- " * 500, "{" * 200, "a: " * 50, "x: 0o17", "x: .inf", "x: .nan", "true: 1", "null: 1", "~: ~", "\ufeffx: 1",
    "x: y: z",
)  # fmt: skip


def mutated(data: bytes, dice: random.Random, others: Sequence[bytes]) -> bytes:
    """The bytes after one to six flips, deletions, insertions, repetitions or splices with another document."""
    raw = bytearray(data)
    for _ in range(dice.choice((1, 1, 1, 2, 3, 6))):
        at = dice.randint(0, len(raw))
        length = dice.choice((1, 1, 2, 4, 8, 30))
        kind = dice.randrange(7)
        if kind == 0 and raw:
            raw[at % len(raw)] ^= 1 << dice.randrange(8)
        elif kind == 1:
            del raw[at : at + length]
        elif kind == 2:
            raw[at:at] = dice.choice(BYTES) * dice.choice((1, 1, 2, 300))
        elif kind == 3:
            raw[at : at + length] = dice.randbytes(length)
        elif kind == 4:
            del raw[at:]
        elif kind == 5:
            raw[at:at] = raw[dice.randint(0, len(raw)) :][: dice.choice((10, 100, 1000))]
        else:
            other = dice.choice(others)
            raw[at:] = other[dice.randint(0, len(other)) :]
    return bytes(raw)


def lines_mutated(text: str, dice: random.Random) -> str:
    """YAML text after one to four changes of its lines."""
    lines = text.splitlines()
    for _ in range(dice.choice((1, 1, 2, 4))):
        at = dice.randint(0, max(0, len(lines) - 1))
        kind = dice.randrange(6)
        if kind == 0:
            lines.insert(at, dice.choice(LINES))
        elif not lines:
            continue
        elif kind == 1:
            del lines[at]
        elif kind == 2:
            lines.insert(dice.randint(0, len(lines)), lines[at])
        elif kind == 3:
            lines[at] = dice.choice(("  ", "\t", "- ", " ")) + lines[at]
        elif kind == 4:
            lines[at] = lines[at].partition(":")[0] + ": " + dice.choice(LINES).partition(":")[2]
        else:
            other = dice.randint(0, len(lines) - 1)
            lines[at], lines[other] = lines[other], lines[at]
    return "\n".join(lines) + "\n"
