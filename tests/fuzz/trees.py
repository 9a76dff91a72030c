"""JSON documents as trees that may be wrong: keys twice, numbers that no type holds, words that aren't JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

Spot = tuple[Any, int]
"""A list (of values, or of pairs) and a position in it."""


@dataclass
class Pair:
    """A key and its value."""

    key: str
    value: Any


@dataclass
class Object:
    """A JSON object, whose keys may repeat."""

    pairs: list[Pair] = field(default_factory=list)


@dataclass(frozen=True)
class Raw:
    """Text that is written as it is."""

    text: str


def parse(text: str | bytes) -> Any:
    """The tree of a JSON text."""
    return json.loads(text, object_pairs_hook=lambda pairs: Object([Pair(*pair) for pair in pairs]))


def tree(value: Any) -> Any:
    """The tree of plain data."""
    if isinstance(value, dict):
        return Object([Pair(key, tree(item)) for key, item in value.items()])
    return [tree(item) for item in value] if isinstance(value, (list, tuple)) else value


def text(node: Any) -> str:
    """The tree as JSON, or as what looks like it. Numbers of any length are written out."""
    if isinstance(node, Object):
        return "{" + ", ".join(f"{text(str(pair.key))}: {text(pair.value)}" for pair in node.pairs) + "}"
    if isinstance(node, list):
        return "[" + ", ".join(map(text, node)) + "]"
    return node.text if isinstance(node, Raw) else json.dumps(node)


def plain(node: Any) -> Any:
    """The tree as plain data, the last of equal keys winning. ValueError where it isn't JSON."""
    return json.loads(text(node))


def copied(node: Any) -> Any:
    """A tree that shares nothing with `node`."""
    if isinstance(node, Object):
        return Object([Pair(pair.key, copied(pair.value)) for pair in node.pairs])
    return [copied(item) for item in node] if isinstance(node, list) else node


def spots(node: Any) -> Iterator[Spot]:
    """Every place in the tree that a value stands at."""
    if isinstance(node, Object):
        for number, pair in enumerate(node.pairs):
            yield node.pairs, number
            yield from spots(pair.value)
    elif isinstance(node, list):
        for number, item in enumerate(node):
            yield node, number
            yield from spots(item)


def get(spot: Spot) -> Any:
    """The value that stands there."""
    here = spot[0][spot[1]]
    return here.value if isinstance(here, Pair) else here


def put(spot: Spot, value: Any) -> None:
    """Another value there."""
    holder, number = spot
    if isinstance(holder[number], Pair):
        holder[number].value = value
    else:
        holder[number] = value


NUMBERS = (
    0, 1, -1, 2, 3, 7, 64, 255, 4096, 65535, 65536, 2**31 - 1, 2**31, 2**32, 2**40, 2**53, 2**61, 2**62, 2**63 - 8,
    2**63 - 1, 2**63, 2**64, 10**30, 10**400, -(2**63), -(2**70), 0.0, -0.0, 0.5, 1.0, 2.0, 1e300, 1e-320,
)  # fmt: skip
RAWS = (
    "NaN", "Infinity", "-Infinity", "-0", "1e999", "-1E+400", "01", "1.", "0x10", "1e5", "1.0e0", "True", "nul",
    "'a'", "",
    "[" * 60 + "]" * 60, "[" * 5000, "[" * 5000 + "]" * 5000, '{"a":' * 3000, "9" * 5000, "// x", "*a", "&a 1",
    "!!int 1",
)  # fmt: skip
WORDS = (
    "", " ", ".", "..", "../x", "../../etc/passwd", "/etc/passwd", "a/b", "a\\b", "a\0b", "\n", "a\nb", "\u00e9",
    "\u202e",
    "\ud800", "\U0001f600", "x" * 300, "x" * 70_000, "0", "-1", "0-3", "0-65535", "0-3,7", "none", "null", "true", "~",
    "contiguous", "{expert}", "{layer}", "{}", "%s", "model.safetensors", "manifest.json", "plan.yaml", "con", "BF16",
    "F4",
    "F8_E8M0", "F64", "0" * 32, "f" * 32, "__metadata__", "conversion.lock", "source", "1,2", "٣", "=hidden_size",
    "a b",
)  # fmt: skip


def mutated(root: Any, dice: random.Random, others: list[str]) -> Any:
    """The tree after one to four changes; `others` are further words that mean something in such documents."""
    holder = [copied(root)]
    for _ in range(dice.choice((1, 1, 1, 2, 2, 3, 4))):
        places = list(spots(holder))
        if not places:
            return Raw("")
        # as often near the root as deep in the leaves, of which there are many more
        spot = dice.choice(places[: max(8, len(places) // 8)] if dice.random() < 0.3 else places)
        dice.choice(CHANGES)(spot, dice, places, others)
    return holder[0] if holder else Raw("")


def depth(node: Any) -> int:
    """How deep the tree is; counted without recursion."""
    deep, level = 0, [node]
    while level:
        deep += 1
        inner = [pair.value for item in level if isinstance(item, Object) for pair in item.pairs]
        level = inner + [value for item in level if isinstance(item, list) for value in item]
    return deep


Change = Callable[[Spot, random.Random, list[Spot], list[str]], None]


def anything(spot: Spot, dice: random.Random, places: list[Spot], others: list[str]) -> None:
    """A value of any kind in its place."""
    put(spot, dice.choice([_number, _word, _raw, _kind])(dice, others))


def number(spot: Spot, dice: random.Random, places: list[Spot], others: list[str]) -> None:
    """Another number: near the one that stands there, or far away."""
    here = get(spot)
    if type(here) is not int:
        numbers = [place for place in places if type(get(place)) is int]
        if not numbers:
            return
        spot = dice.choice(numbers)
        here = get(spot)
    near = [here + step for step in (1, -1, 8, -8, 2**32, 2**63)] + [here * 2, here // 2, -here]
    near.append(float(here) if abs(here) < 2**900 else 0.5)
    put(spot, dice.choice(near) if dice.random() < 0.6 else _number(dice, others))


def gone(spot: Spot, dice: random.Random, places: list[Spot], others: list[str]) -> None:
    """Nothing there."""
    holder, place = spot
    if place < len(holder):
        del holder[place]


def twice(spot: Spot, dice: random.Random, places: list[Spot], others: list[str]) -> None:
    """The same once more, or many times."""
    holder, place = spot
    if place < len(holder):
        for _ in range(dice.choice((1, 1, 1, 2, 500))):
            again = holder[place]
            again = Pair(again.key, copied(again.value)) if isinstance(again, Pair) else copied(again)
            holder.insert(dice.randint(0, len(holder)), again)


def renamed(spot: Spot, dice: random.Random, places: list[Spot], others: list[str]) -> None:
    """Another key: a sibling's, a strange one, or nearly the same."""
    holder, place = spot
    if place >= len(holder) or not isinstance(holder[place], Pair):
        return
    key = holder[place].key
    near = [key + "x", key[:-1], key.upper(), key + ".0", "." + key, key.replace("0", "1"), key.replace("0", "00")]
    holder[place].key = dice.choice([*near, dice.choice(holder).key, _word(dice, others)])


def exchanged(spot: Spot, dice: random.Random, places: list[Spot], others: list[str]) -> None:
    """What stands at another place, here; and perhaps the other way round."""
    other = dice.choice(places)
    here, there = copied(get(spot)), copied(get(other))
    put(spot, there)
    if dice.random() < 0.5:
        put(other, here)


def wrapped(spot: Spot, dice: random.Random, places: list[Spot], others: list[str]) -> None:
    """The same, one or many levels deeper."""
    node = copied(get(spot))
    for _ in range(dice.choice((1, 1, 2, 40, 100)) if depth(node) < 60 else 1):
        node = [node] if dice.random() < 0.5 else Object([Pair("a", node)])
    put(spot, node)


def spelled(spot: Spot, dice: random.Random, places: list[Spot], others: list[str]) -> None:
    """A word changed by a letter, cut, or joined with another."""
    here = get(spot)
    if not isinstance(here, str):
        words = [place for place in places if isinstance(get(place), str)]
        if not words:
            return
        spot = dice.choice(words)
        here = get(spot)
    at = dice.randint(0, len(here))
    letter = dice.choice("0123456789abz{}[]()*+-.,:=/\\ \n\0é_")
    joined = [here[:at], here[at:], here + _word(dice, others), here[:at] + here]
    near = [here[:at] + letter + here[at + 1 :], here[:at] + here[at + 1 :], here[:at] + letter + here[at:]]
    put(spot, dice.choice([*near, *joined]))


CHANGES: tuple[Change, ...] = (
    anything, anything, number, number, number, gone, twice, renamed, exchanged, wrapped, spelled, spelled
)  # fmt: skip


def _number(dice: random.Random, others: list[str]) -> Any:
    return dice.choice(NUMBERS)


def _word(dice: random.Random, others: list[str]) -> Any:
    return dice.choice(others) if others and dice.random() < 0.4 else dice.choice(WORDS)


def _raw(dice: random.Random, others: list[str]) -> Any:
    return Raw(dice.choice(RAWS))


def _kind(dice: random.Random, others: list[str]) -> Any:
    return dice.choice([None, True, False, [], Object(), [0] * 5000, Object([Pair("a", 1)]), [[0, 1]], [None], "1", 1])
